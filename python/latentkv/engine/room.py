"""Room in the cache: what running answers may still take is theirs, and idle sequences leave for it."""

from __future__ import annotations

import contextlib
import sys
from functools import partial

from latentkv.console.printable import printable
from latentkv.engine.counters import Counters
from latentkv.engine.request import Request
from latentkv.engine.sequences import Sequences
from latentkv.engine.slot import Slot
from latentkv.engine.store import PrefixStore

TILE = 64  # cells that a sequence may take beyond its tokens: rows go in whole tiles
LEAST_PARKED = 128  # tokens that are worth a place in the store
EXTENSION = 256  # tokens by which an answer without a limit grows its reservation


class Room:
    """store: where sequences go that leave (None: they are forgotten). n_ctx_seq: tokens that one may
    have."""

    def __init__(
        self, sequences: Sequences, store: PrefixStore | None, n_ctx_seq: int, counters: Counters
    ) -> None:
        self.sequences, self.store, self.n_ctx_seq = sequences, store, n_ctx_seq
        self.session, self.counters = sequences.session, counters

    def free(self, slot: Slot) -> int:
        """Cells that nobody holds or may still take, for `slot`."""
        running = self.sequences.running
        others = [each for each in running if each is not slot]
        slack = TILE * (len(others) + 1 if others else 0)
        return self.session.n_ctx - self.session.n_cells_used() - sum(s.reserved for s in running) - slack

    def make(self, slot: Slot, wanted: int) -> bool:
        """Idle sequences but `slot` leave, the longest unused first, until `wanted` cells are free."""
        slots = self.sequences.slots
        others = sorted((s for s in slots if s.job is None and s is not slot and s.tokens), key=age)
        while self.free(slot) < wanted:
            if not others:
                return False
            self.park(others.pop(0))
        return True

    def grow(self, slot: Slot) -> None:
        """More room for an answer that was promised less than it may have, if there is any."""
        assert slot.job is not None
        answer = slot.job.writer
        if answer.limit < answer.hard_limit and answer.left <= 1:
            shift = self.sequences.shift
            if shift is not None and len(slot.tokens) + 1 >= self.n_ctx_seq:
                self.sequences.halve(slot, shift.n_keep)
            room = self.n_ctx_seq - 1 - len(slot.tokens)
            more = min(EXTENSION, answer.hard_limit - answer.limit, room)
            answer.limit += more if self.make(slot, more) else max(0, min(more, self.free(slot)))

    # The store.

    def park(self, slot: Slot) -> None:
        """Leaves the cache to others, and keeps what the sequence holds in the store."""
        self.save(slot)
        self.sequences.forget(slot)

    def save(self, slot: Slot) -> None:
        if self.store is None or len(slot.tokens) < LEAST_PARKED or slot.shifted_at is not None:
            return
        settled = self.session.seq_settled(slot.seq)
        rows = partial(self.session.seq_state_parts, slot.seq)
        self.store.put(slot.tokens, rows, settled, slot.salt)

    def restore(self, slot: Slot, request: Request, least: int) -> bool:
        """Takes from the store what begins like the prompt, if `least` tokens of it can be kept."""
        if self.store is None:
            return False
        key, worth = self.store.best(
            lambda tokens: self.sequences.worth(tokens, request.prompt), request.salt
        )
        if worth < least:
            return False
        tokens, is_own = self.store.tokens(key), self.store.is_own(key)
        if self._promised() + len(tokens) > self.session.n_ctx:
            return False
        rows = self.store.take(key)  # before others go to the store, which may push it out
        if rows is None:
            return False
        self.park(slot)
        if not self.make(slot, len(tokens)):
            return False
        try:
            is_coded = self.session.set_seq_state(slot.seq, rows, accept="finer")
        except ValueError as error:  # no room in a region that others fill: all is computed
            if not is_own:
                with contextlib.suppress(KeyError):  # another took its place meanwhile
                    self.store.pass_over(key)
                _note(f"{len(tokens)} tokens that are kept in other row formats are computed anew: {error}")
            return False
        if is_coded:
            _note(f"{len(tokens)} tokens were kept in finer row formats, and are coded anew: bits are lost")
        slot.tokens, slot.salt = list(tokens), request.salt
        self.sequences.cut(slot, self.sequences.resumable(slot, worth))
        self.counters.restored_tokens += len(slot.tokens)
        return True

    def _promised(self) -> int:
        """Cells that running answers hold and may still take, at most."""
        return sum(len(slot.tokens) + slot.reserved + TILE for slot in self.sequences.running)

    def close_store(self) -> None:
        """Keeps what idle sequences hold, for the next start."""
        if self.store is not None:
            for slot in self.sequences.slots:
                if slot.job is None:
                    self.save(slot)
            self.store.close()


def age(slot: Slot) -> int:
    return slot.used


def _note(text: str) -> None:
    print(f"note: {printable(text)}", file=sys.stderr, flush=True)
