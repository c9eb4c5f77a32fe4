"""The sequences of one session: what of them a prompt can go on from, and how they give up the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from latentkv.engine.request import Request
from latentkv.engine.reuse import Move, Reuse
from latentkv.engine.shift import Shift
from latentkv.engine.slot import Slot
from latentkv.session.prefix import common, kept

if TYPE_CHECKING:
    from latentkv import _core


class Sequences:
    """`slots` are the truth about what the cache holds. shift, reuse: as Scheduler's."""

    def __init__(self, session: _core.Session, shift: Shift | None, reuse: Reuse | None) -> None:
        self.session, self.shift, self.reuse = session, shift, reuse
        self.slots = [Slot(seq) for seq in range(session.n_seq_max)]
        self.rewinds = session.rewinds
        self._turn = 0

    @property
    def running(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.job is not None]

    def touch(self, slot: Slot) -> None:
        self._turn += 1
        slot.used = self._turn

    # What a prompt can go on from.

    def worth(self, tokens: Sequence[int], prompt: Sequence[int]) -> int:
        """How many of a sequence's tokens that are."""
        return kept(tokens, prompt, self.session.n_recent, self.rewinds)

    def kept(self, slot: Slot, request: Request) -> int:
        if slot.salt != request.salt:
            return 0
        keep = self.resumable(slot, self.worth(slot.tokens, request.prompt))
        return keep if slot.shifted_at is None else min(keep, slot.shifted_at)

    def resumable(self, slot: Slot, count: int) -> int:
        """How many of the slot's first `count` tokens those are: where layers are recurrent, those before a
        snapshot."""
        return self.session.seq_resumable(slot.seq, count) if self.session.is_recurrent else count

    def shared(self, slot: Slot, request: Request) -> int:
        """How many tokens of the slot another sequence may hold too. A shift moves cells for all who hold
        them, and leaves those before `n_keep` where they are. Under eviction a sequence has what its own
        queries chose."""
        if self.session.evict != "none":
            return 0
        keep = self.kept(slot, request)
        return keep if self.shift is None else self.resumable(slot, min(keep, self.shift.n_keep))

    def lendable(self, slot: Slot, request: Request) -> int:
        """The same of a slot that has read its prompt."""
        assert slot.job is not None
        read = slot.job.ticket.request
        if read.salt != request.salt:
            return 0
        keep = self.resumable(slot, self.worth(read.prompt, request.prompt))
        if slot.shifted_at is not None:
            keep = min(keep, slot.shifted_at)
        return keep if self.shift is None else min(keep, self.shift.n_keep)

    def plan(self, slot: Slot, request: Request) -> tuple[int, list[Move]]:
        """How many of its tokens the prompt can go on from, and what has to move for that."""
        keep, prompt = self.kept(slot, request), request.prompt
        if self.reuse is not None and len(slot.tokens) > keep and slot.salt == request.salt:
            start = common(slot.tokens, prompt)
            if slot.shifted_at is not None:
                start = min(start, slot.shifted_at)
            moves = self.reuse.moves(slot.tokens, prompt, start, slot.lent)
            if moves and (more := self.reuse.kept(moves, len(slot.tokens), self.session.n_recent)) > keep:
                return more, moves
        return keep, []

    # What becomes of the rest.

    def lend(self, slot: Slot, to: Slot, count: int) -> bool:
        """The first `count` tokens, to a slot that is empty. False: layers with a sliding window have no rows
        of them any more, or recurrent layers no snapshot."""
        try:
            self.session.seq_cp(slot.seq, to.seq, 0, count)
        except ValueError:
            return False
        to.tokens, to.salt = slot.tokens[:count], slot.salt
        to.lent, slot.lent = count, max(slot.lent, count)
        return True

    def cut(self, slot: Slot, keep: int) -> None:
        if keep > 0 and self.session.seq_rm(slot.seq, keep, -1):
            del slot.tokens[keep:]
            if slot.shifted_at is not None and slot.shifted_at >= keep:
                slot.shifted_at = None
            slot.lent = min(slot.lent, keep)
        else:
            self.forget(slot)

    def take_back(self, slot: Slot) -> list[int]:
        """The cache without the guesses behind the slot's tokens. Returns those of its tokens that have to be
        computed once more: recurrent layers may have no state behind them."""
        held, salt, keep = slot.tokens, slot.salt, self.resumable(slot, len(slot.tokens))
        again = held[keep:]
        self.cut(slot, keep)
        slot.salt = salt  # of its request, also where all went
        return again if slot.tokens is held else held

    def move(self, slot: Slot, moves: Sequence[Move]) -> bool:
        """Moves chunks to their new positions; what stands between them is forgotten. False, and so is all:
        layers with a sliding window have no rows of what comes into sight."""
        for move in moves:
            try:
                is_whole = self.session.seq_rm(slot.seq, move.to, move.first)
                end = move.first + move.count
                if is_whole and move.first > move.to:
                    self.session.seq_add(slot.seq, move.first, end, move.to - move.first)
            except ValueError:
                is_whole = False
            if not is_whole:
                self.forget(slot)
                return False
            chunk = slot.tokens[move.first : end]
            slot.tokens[move.to : move.to + move.count] = chunk  # never behind where it was
        if moves:
            slot.shifted_at = moves[0].to
            slot.lent = min(slot.lent, moves[0].to)
        return True

    def halve(self, slot: Slot, n_keep: int) -> None:
        """Forgets half of the tokens after the first `n_keep`; the others move forward. Not where a sliding
        window would miss some."""
        last = n_keep + (len(slot.tokens) - n_keep) // 2
        last = min(last, len(slot.tokens) - self.session.window)  # what layers with a window hold stays
        if last <= n_keep:
            return
        if not self.session.seq_rm(slot.seq, n_keep, last):
            return
        self.session.seq_add(slot.seq, last, -1, n_keep - last)
        del slot.tokens[n_keep:last]
        slot.shifted_at = n_keep

    def forget(self, slot: Slot) -> None:
        self.session.seq_rm(slot.seq)
        self.is_empty(slot)

    def is_empty(self, slot: Slot) -> None:
        """Says so of a slot whose tokens have gone."""
        slot.tokens, slot.shifted_at, slot.lent, slot.salt = [], None, 0, ""
