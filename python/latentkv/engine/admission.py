"""Which request starts next, in which sequence, and how much of its prompt is there already."""

from __future__ import annotations

import sys

from latentkv.engine.request import Request, Ticket
from latentkv.engine.room import LEAST_PARKED, TILE, Room
from latentkv.engine.slot import Slot


class Admission:
    """A request is admitted when a sequence is free and the cache has room for its prompt and its answer, in
    the order they came; what idle sequences hold is kept for prompts that begin alike, and goes, the longest
    unused first, when there is no other room. So a running answer never meets a full cache."""

    def __init__(self, room: Room) -> None:
        self.room, self.sequences, self.session = room, room.sequences, room.session
        self.n_ctx_seq = room.n_ctx_seq

    def is_read_now(self, idle: list[Slot], ticket: Ticket) -> bool:
        """Whether another request reads what this prompt begins with, more than an idle sequence has of it:
        choices of one request, clients with one system prompt. It is lent when it is read."""
        request, sequences = ticket.request, self.sequences
        if request.scores_prompt or not request.reuses:
            return False
        most = max(sequences.kept(slot, request) for slot in idle)
        most = max(most, *(sequences.shared(slot, request) for slot in sequences.slots))
        readers = (slot for slot in sequences.running if not slot.has_read and not slot.embeds)
        return any(sequences.lendable(slot, request) > most + TILE for slot in readers)

    def waits(self, idle: list[Slot], ticket: Ticket) -> bool:
        """Whether another request is worth waiting for. Texts to embed take one conversation's sequence at
        most, and have it one after another."""
        if ticket.request.pooling is not None and all(slot.tokens for slot in idle):
            return any(slot.embeds for slot in self.sequences.running)
        return self.is_read_now(idle, ticket)

    def place(self, idle: list[Slot], ticket: Ticket) -> tuple[Slot, int, int, int] | None:
        """A sequence for the request, how many of its tokens the prompt goes on from, and how many tokens the
        answer may have now and in all; None: there is no room."""
        request, prompt = ticket.request, ticket.request.prompt
        slot = self._chosen(idle, request) if request.reuses else min(idle, key=_loss)
        if request.scores_prompt or not request.reuses:
            self.room.park(slot)
            keep = 0
        else:
            keep = self._rewind(slot, request)
        room = self.n_ctx_seq - len(prompt)
        asked = request.max_tokens
        hard = self._hard_limit(asked, room)
        share = max(1, self.session.n_ctx // len(self.sequences.slots) - len(prompt))
        limit = min(hard, room, room if asked >= 0 else share)
        if not self.room.make(slot, len(prompt) - keep + max(0, limit - 1)):
            if self.sequences.running:
                return None
            self.room.park(slot)  # alone, but for broken blocks of what it keeps
            keep = 0
        slot.salt = request.salt  # what it holds is of no other
        return slot, keep, limit, hard

    def _chosen(self, idle: list[Slot], request: Request) -> Slot:
        """The idle sequence that the prompt has most in common with. Where that has much more, another
        conversation, it lends its beginning to an empty sequence or the longest unused one."""
        shared = {slot.seq: self.sequences.shared(slot, request) for slot in self.sequences.slots}

        def order(slot: Slot) -> tuple[int, bool, bool, bool, int]:
            keep = self.sequences.plan(slot, request)[0]
            lent = max((count for seq, count in shared.items() if seq != slot.seq), default=0)
            stays = lent <= keep + TILE  # its own tokens are the prompt's beginning
            lost = len(slot.tokens) - keep if stays else len(slot.tokens)
            worth = keep if stays else lent
            return worth, lost < LEAST_PARKED, stays and keep > 0, not slot.tokens, -slot.used

        return max(idle, key=order)

    def _hard_limit(self, asked: int, room: int) -> int:
        """Tokens that an answer may have at most."""
        if self.sequences.shift is not None:
            return asked if asked >= 0 else sys.maxsize
        return min(asked, room) if asked >= 0 else room

    def _rewind(self, slot: Slot, request: Request) -> int:
        """Leaves in the slot what the prompt can go on from, or takes it from another one, as a token may
        belong to several sequences. Returns how many tokens that are."""
        sequences = self.sequences
        keep, moves = sequences.plan(slot, request)
        other = max(sequences.slots, key=lambda each: sequences.shared(each, request))
        shared = sequences.shared(other, request)
        if self.room.restore(slot, request, max(keep, shared) + TILE):
            return len(slot.tokens)
        if shared > keep + TILE:
            self.room.park(slot)
            sequences.lend(other, slot, shared)
        elif keep < len(slot.tokens):
            if len(slot.tokens) - keep >= LEAST_PARKED:
                self.room.save(slot)
            if sequences.move(slot, moves):
                sequences.cut(slot, keep)
        return len(slot.tokens)


def _loss(slot: Slot) -> tuple[bool, int]:
    """The order in which slots lose their tokens: empty ones first, then those unused for longest."""
    return bool(slot.tokens), slot.used
