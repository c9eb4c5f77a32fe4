"""Which tokens go through the model next: those of all answers that are being written, and pieces of the
prompts that wait to be read.

One step is one decode call. Every answer gets its token in every step; prompts share what room is left in it,
all alike. Nothing here knows threads: `Engine` calls step() on one.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from latentkv.engine.batch import Batch, Part
from latentkv.engine.outbox import Outbox
from latentkv.engine.request import StepError, Ticket
from latentkv.engine.reuse import Move, Reuse
from latentkv.engine.shift import Shift
from latentkv.engine.slot import Job, Slot, drawn
from latentkv.engine.store import PrefixStore
from latentkv.errors import LatentKVError, expected
from latentkv.generate.answer import Piece
from latentkv.session.prefix import Window, common, kept

if TYPE_CHECKING:
    from latentkv import _core

MIXED_CHUNK = 128  # prompt tokens of a step that answers wait for: the longest ubatch beside exact windows
TILE = 64  # cells that a sequence may take beyond its tokens: rows go in whole tiles
LEAST_CHUNK = 32  # of a prompt, in a step: fewer tokens do not fill a matrix product
LEAST_PARKED = 128  # tokens that are worth a place in the store
EXTENSION = 256  # tokens by which an answer without a limit grows its reservation


@dataclass
class Counters:
    """Since the start."""

    requests: int = 0
    prompt_tokens: int = 0  # computed
    cached_tokens: int = 0  # of prompts, found in the cache
    restored_tokens: int = 0  # of those, from the store
    predicted_tokens: int = 0
    prompt_seconds: float = 0.0
    predicted_seconds: float = 0.0
    steps: int = 0
    step_tokens: int = 0
    step_slots: int = 0
    longest: int = 0  # tokens of a prompt and its answer


class Scheduler:
    """Requests over the sequences of one session.

    A request is admitted when a sequence is free and the cache has room for its prompt and its answer, in the
    order they came; what idle sequences hold is kept for prompts that begin alike, and goes, the longest
    unused first, when there is no other room. So a running answer never meets a full cache.
    """

    def __init__(
        self,
        model: _core.Model,
        session: _core.Session,
        *,
        n_batch: int = 2048,
        n_ctx_seq: int | None = None,
        window: Window | None = None,
        last_n_tokens: int = 64,
        shift: Shift | None = None,
        store: PrefixStore | None = None,
        reuse: Reuse | None = None,
    ) -> None:
        """n_ctx_seq: tokens that a sequence may have (None: all of the cache).
        shift: what becomes of a sequence that has as many (None: its answer ends).
        store: where sequences go that lose their place (None: they are forgotten).
        reuse: of chunks further on in a sequence (None: what a prompt does not begin with is computed).
        """
        self.model, self.session, self.n_batch = model, session, n_batch
        self.n_ctx_seq = min(n_ctx_seq or session.n_ctx, session.n_ctx)
        self.window, self.last_n_tokens = window or Window(), last_n_tokens
        self.slots = [Slot(seq) for seq in range(session.n_seq_max)]
        self.waiting: deque[Ticket] = deque()
        self.counters = Counters()
        self.outbox = Outbox()
        self.shift, self.store, self.reuse = shift, store, reuse
        self._is_lazy = session.prefill == "lazy"
        self._rewinds = session.rewinds
        self._turn = 0

    @property
    def running(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.job is not None]

    def check(self, ticket: Ticket) -> None:
        """Raises LatentKVError for a prompt that no cache of this size can answer."""
        if not len(ticket.request.prompt):
            raise expected("prompt", "at least one token", "none")
        if ticket.request.slot >= len(self.slots):
            raise expected("id_slot", f"-1 … {len(self.slots) - 1}", ticket.request.slot, "raise --parallel")
        self.check_length(len(ticket.request.prompt))

    def check_length(self, count: int) -> None:
        """Raises LatentKVError for a prompt of so many tokens that none is left to answer."""
        if count >= self.n_ctx_seq:
            raise self.too_long(f"{count}")

    def too_long(self, got: str) -> LatentKVError:
        hint = "shorten it, or raise -c / n_ctx"
        return expected("context", f"a prompt of at most {self.n_ctx_seq - 1} tokens", got, hint)

    def submit(self, ticket: Ticket) -> None:
        self.waiting.append(ticket)

    def step(self) -> bool:
        """Runs one decode call; False when there was nothing to do."""
        self._drop_cancelled()
        self._admit()
        batch = self._batch()
        if not batch.tokens:
            return False
        self.counters.steps += 1
        self.counters.step_tokens += len(batch.tokens)
        self.counters.step_slots += len(batch.parts)
        try:
            logits = self._decode(batch)
        except Exception as error:
            self._fail_all(batch, StepError.of(error))
            return True
        self._advance([part for part in batch.parts if self._has_read(part, logits)], logits)
        return True

    def _decode(self, batch: Batch) -> NDArray[np.float32]:
        """Logits of what wanted them, [n, n_vocab]. Of a prompt that is scored and goes in one call only the
        last, as all of them may be gigabytes."""
        job = batch.parts[0].slot.job
        if job is None or not job.scores or not self._is_lazy or len(batch.parts) > 1:
            return self.session.decode(batch.tokens, seq=batch.seqs, output=batch.output)
        last: list[NDArray[np.float32]] = []

        def take(logits: NDArray[np.float32]) -> None:
            job.score(logits)
            last[:] = [logits[-1:].copy()]

        self.session.decode(batch.tokens, seq=batch.seqs, output=batch.output, take=take)
        batch.parts[0] = replace(batch.parts[0], last=1)
        return last[0]

    def _has_read(self, part: Part, logits: NDArray[np.float32]) -> bool:
        """Whether a token comes next, after what was evaluated of a slot."""
        slot, job = part.slot, part.slot.job
        assert job is not None
        slot.tokens += job.pending[: part.count]
        del job.pending[: part.count]
        try:
            if not job.has_read:
                prompt = job.read(logits[part.first : part.last])
                if prompt is not None:
                    self._show(slot, prompt)
            if slot.job is None or job.pending:
                return False
            self._grow(slot)
        except Exception as error:
            self._fail(slot, _said(StepError.of(error)))
            return False
        return True

    def _advance(self, parts: Sequence[Part], logits: NDArray[np.float32]) -> None:
        """The next token of each, all drawn in one call."""
        jobs = [part.slot.job for part in parts if part.slot.job is not None]
        rows = [part.last - 1 for part in parts]
        for part, job, token in zip(parts, jobs, drawn(jobs, logits, rows), strict=True):
            try:
                self._show(part.slot, job.advance(token, logits[part.last - 1]))
            except Exception as error:
                self._fail(part.slot, _said(StepError.of(error)))

    def _show(self, slot: Slot, piece: Piece) -> None:
        assert slot.job is not None
        ticket = slot.job.ticket
        if piece.finish_reason is not None:
            self._finish(slot)
        if piece.text or piece.tokens or piece.finish_reason is not None:
            ticket.put(piece, self.outbox)

    def _batch(self) -> Batch:
        batch = Batch()
        reading = sorted((slot for slot in self.running if not slot.has_read), key=_age)
        fresh = [slot for slot in reading if not slot.tokens]
        if self._is_lazy and fresh:  # exact K and V of a prompt: in a call in which every sequence starts
            batch.add(fresh[0], self.session.n_ctx)
            return batch
        for slot in self.running:
            if slot.has_read:
                batch.add(slot, 1)
        room = MIXED_CHUNK if batch.tokens else self.n_batch
        together = max(1, min(len(reading), room // LEAST_CHUNK))
        scored = MIXED_CHUNK  # tokens of a step, of all prompts: the logits of each are a row of n_vocab
        for slot in reading[:together]:
            assert slot.job is not None
            count = min(room // together, len(slot.job.pending))
            if slot.job.scores:
                count = min(count, scored)
                scored -= count
            if count:
                batch.add(slot, count)
        return batch

    def erase(self, seq: int) -> int:
        """Forgets what an idle sequence holds; how many tokens that were. Raises LatentKVError while it
        answers."""
        slot = self.slots[seq]
        if slot.job is not None:
            raise expected("slot", "an idle one", f"{seq}, which writes an answer")
        count = len(slot.tokens)
        self._forget(slot)
        return count

    def abandon(self, error: Exception) -> None:
        """Ends everything that runs or waits."""
        for slot in self.running:
            self._fail(slot, error)
        while self.waiting:
            self.waiting.popleft().fail(error, self.outbox)

    def close(self, error: Exception) -> None:
        """Ends everything, and keeps what idle sequences hold."""
        self.abandon(error)
        self.close_store()

    # Who runs.

    def _drop_cancelled(self) -> None:
        self.waiting = deque(ticket for ticket in self.waiting if not ticket.cancelled)
        for slot in self.running:
            assert slot.job is not None
            if slot.job.ticket.cancelled:
                self._finish(slot)

    def _admit(self) -> None:
        n_passed = 0
        for ticket in list(self.waiting):
            idle = [slot for slot in self.slots if slot.job is None]
            if not idle or n_passed > len(self.slots):
                return
            idle = [slot for slot in idle if ticket.request.slot in (-1, slot.seq)]
            if not idle or self._is_read_now(idle, ticket):
                n_passed += 1
                continue
            if not self._start(idle, ticket):
                return
            self.waiting.remove(ticket)

    def _is_read_now(self, idle: list[Slot], ticket: Ticket) -> bool:
        """Whether another request reads what this prompt begins with, more than an idle sequence has of it:
        choices of one request, clients with one system prompt. It is lent when it is read."""
        prompt = ticket.request.prompt
        if ticket.request.scores_prompt or not ticket.request.reuses:
            return False
        most = max(self._kept(slot, prompt) for slot in idle)
        most = max(most, *(self._shared(slot, prompt) for slot in self.slots))
        readers = (slot for slot in self.slots if slot.job and not slot.has_read)
        return any(self._lendable(slot, prompt) > most + TILE for slot in readers)

    def _lendable(self, slot: Slot, prompt: Sequence[int]) -> int:
        """Of a slot that has read its prompt."""
        assert slot.job is not None
        keep = kept(slot.job.ticket.request.prompt, prompt, self.window, self._rewinds)
        if slot.shifted_at is not None:
            keep = min(keep, slot.shifted_at)
        return keep if self.shift is None else min(keep, self.shift.n_keep)

    def _start(self, idle: list[Slot], ticket: Ticket) -> bool:
        """Gives the request a sequence, if there is room for it."""
        prompt = ticket.request.prompt
        slot = max(idle, key=lambda each: (self._plan(each, prompt)[0], not each.tokens, -each.used))
        if ticket.request.scores_prompt or not ticket.request.reuses:
            self._park(slot)
            keep = 0
        else:
            keep = self._rewind(slot, prompt)
        room = self.n_ctx_seq - len(prompt)
        asked = ticket.request.max_tokens
        hard = self._hard_limit(asked, room)
        share = max(1, self.session.n_ctx // len(self.slots) - len(prompt))
        limit = min(hard, room, room if asked >= 0 else share)
        if not self._make_room(slot, len(prompt) - keep + max(0, limit - 1)):
            if self.running:
                return False
            self._park(slot)  # alone, but for broken blocks of what it keeps
            keep = 0
        try:
            slot.job = Job(self.model, ticket, keep, limit, hard, self.last_n_tokens)
        except Exception as error:
            ticket.fail(error, self.outbox)
            return True
        self._touch(slot)
        ticket.progress.slot = slot.seq
        self.counters.requests += 1
        return True

    def _hard_limit(self, asked: int, room: int) -> int:
        """Tokens that an answer may have at most."""
        if self.shift is not None:
            return asked if asked >= 0 else sys.maxsize
        return min(asked, room) if asked >= 0 else room

    def _kept(self, slot: Slot, prompt: Sequence[int]) -> int:
        keep = kept(slot.tokens, prompt, self.window, self._rewinds)
        return keep if slot.shifted_at is None else min(keep, slot.shifted_at)

    def _shared(self, slot: Slot, prompt: Sequence[int]) -> int:
        """How many tokens of the slot another sequence may hold too. A shift moves cells for all who hold
        them, and leaves those before `n_keep` where they are. Under eviction a sequence has what its own
        queries chose."""
        if self.session.evict != "none":
            return 0
        keep = self._kept(slot, prompt)
        return keep if self.shift is None else min(keep, self.shift.n_keep)

    def _plan(self, slot: Slot, prompt: Sequence[int]) -> tuple[int, list[Move]]:
        """How many of its tokens the prompt can go on from, and what has to move for that."""
        keep = self._kept(slot, prompt)
        if self.reuse is not None and len(slot.tokens) > keep:
            start = common(slot.tokens, prompt)
            if slot.shifted_at is not None:
                start = min(start, slot.shifted_at)
            moves = self.reuse.moves(slot.tokens, prompt, start, slot.lent)
            if moves and (more := self.reuse.kept(moves, len(slot.tokens), self.window)) > keep:
                return more, moves
        return keep, []

    def _rewind(self, slot: Slot, prompt: Sequence[int]) -> int:
        """Leaves in the slot what the prompt can go on from, or takes it from another one, as a token may
        belong to several sequences. Returns how many tokens that are."""
        keep, moves = self._plan(slot, prompt)
        other = max(self.slots, key=lambda each: self._shared(each, prompt))
        shared = self._shared(other, prompt)
        if self.store is not None and self._restored(slot, prompt, max(keep, shared) + TILE):
            return len(slot.tokens)
        if shared > keep + TILE:
            self._park(slot)
            # layers with a sliding window may have no rows of it any more: then all is computed
            with contextlib.suppress(ValueError):
                self.session.seq_cp(other.seq, slot.seq, 0, shared)
                slot.tokens = other.tokens[:shared]
                slot.lent, other.lent = shared, max(other.lent, shared)
        elif keep < len(slot.tokens):
            if len(slot.tokens) - keep >= LEAST_PARKED:
                self._save(slot)
            if self._moved(slot, moves):
                self._cut(slot, keep)
        return len(slot.tokens)

    def _moved(self, slot: Slot, moves: Sequence[Move]) -> bool:
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
                self._forget(slot)
                return False
            chunk = slot.tokens[move.first : end]
            slot.tokens[move.to : move.to + move.count] = chunk  # never behind where it was
        if moves:
            slot.shifted_at = moves[0].to
            slot.lent = min(slot.lent, moves[0].to)
        return True

    def _cut(self, slot: Slot, keep: int) -> None:
        if keep > 0 and self.session.seq_rm(slot.seq, keep, -1):
            del slot.tokens[keep:]
            if slot.shifted_at is not None and slot.shifted_at >= keep:
                slot.shifted_at = None
            slot.lent = min(slot.lent, keep)
        else:
            self._forget(slot)

    # The store.

    def _restored(self, slot: Slot, prompt: Sequence[int], least: int) -> bool:
        """Takes from the store what begins like the prompt, if `least` tokens of it can be kept."""
        assert self.store is not None
        key, worth = self.store.best(lambda tokens: kept(tokens, prompt, self.window, self._rewinds))
        if worth < least:
            return False
        tokens, is_own = self.store.tokens(key), self.store.is_own(key)
        if self._promised() + len(tokens) > self.session.n_ctx:
            return False
        rows = self.store.take(key)  # before others go to the store, which may push it out
        if rows is None:
            return False
        self._park(slot)
        if not self._make_room(slot, len(tokens)):
            return False
        try:
            is_coded = self.session.set_seq_state(slot.seq, rows, accept="finer")
        except ValueError as error:  # no room in a region that others fill: all is computed
            if not is_own:
                self.store.pass_over(key)
                _note(f"{len(tokens)} tokens that are kept in other row formats are computed anew: {error}")
            return False
        if is_coded:
            _note(f"{len(tokens)} tokens were kept in finer row formats, and are coded anew: bits are lost")
        slot.tokens = list(tokens)
        self._cut(slot, worth)
        self.counters.restored_tokens += len(slot.tokens)
        return True

    def _park(self, slot: Slot) -> None:
        """Leaves the cache to others, and keeps what the sequence holds in the store."""
        self._save(slot)
        self._forget(slot)

    def _save(self, slot: Slot) -> None:
        if self.store is not None and len(slot.tokens) >= LEAST_PARKED and slot.shifted_at is None:
            self.store.put(slot.tokens, lambda: self.session.seq_state_bytes(slot.seq))

    def close_store(self) -> None:
        """Keeps what idle sequences hold, for the next start."""
        if self.store is not None:
            for slot in self.slots:
                if slot.job is None:
                    self._save(slot)
            self.store.close()

    # Room.

    def _free(self, slot: Slot) -> int:
        """Cells that nobody holds or may still take, for `slot`."""
        others = [each for each in self.running if each is not slot]
        slack = TILE * (len(others) + 1 if others else 0)
        return (
            self.session.n_ctx - self.session.n_cells_used() - sum(s.reserved for s in self.running) - slack
        )

    def _promised(self) -> int:
        """Cells that running answers hold and may still take, at most."""
        return sum(len(slot.tokens) + slot.reserved + TILE for slot in self.running)

    def _make_room(self, slot: Slot, wanted: int) -> bool:
        """Forgets what idle sequences but `slot` hold, the longest unused first, until `wanted` cells are
        free."""
        others = sorted((s for s in self.slots if s.job is None and s is not slot and s.tokens), key=_age)
        while self._free(slot) < wanted:
            if not others:
                return False
            self._park(others.pop(0))
        return True

    def _grow(self, slot: Slot) -> None:
        """More room for an answer that was promised less than it may have, if there is any."""
        job = slot.job
        assert job is not None
        if job.limit < job.hard_limit and job.ticket.progress.completion_tokens + 1 >= job.limit:
            if self.shift is not None and len(slot.tokens) + 1 >= self.n_ctx_seq:
                self._shift(slot, self.shift.n_keep)
            room = self.n_ctx_seq - 1 - len(slot.tokens)
            more = min(EXTENSION, job.hard_limit - job.limit, room)
            job.limit += more if self._make_room(slot, more) else max(0, min(more, self._free(slot)))

    def _shift(self, slot: Slot, n_keep: int) -> None:
        """Forgets half of the tokens behind the first `n_keep`; the others move forward. Not where a sliding
        window would miss some: then the answer ends."""
        last = n_keep + (len(slot.tokens) - n_keep) // 2
        last = min(last, len(slot.tokens) - self.session.window)  # what layers with a window hold stays
        if last <= n_keep:
            return
        if not self.session.seq_rm(slot.seq, n_keep, last):
            return
        self.session.seq_add(slot.seq, last, -1, n_keep - last)
        del slot.tokens[n_keep:last]
        slot.shifted_at = n_keep

    # Ends.

    def _finish(self, slot: Slot) -> None:
        assert slot.job is not None
        progress, counters = slot.job.ticket.progress, self.counters
        timings = progress.timings
        counters.prompt_tokens += timings.prompt_n
        counters.cached_tokens += timings.cached_n
        counters.prompt_seconds += timings.prompt_s
        counters.predicted_tokens += progress.completion_tokens
        counters.predicted_seconds += timings.predicted_s
        counters.longest = max(counters.longest, progress.prompt_tokens + progress.completion_tokens)
        slot.job = None
        self._touch(slot)

    def _fail(self, slot: Slot, error: Exception) -> None:
        """What its sequence holds is not known to be whole."""
        assert slot.job is not None
        ticket = slot.job.ticket
        self._finish(slot)
        self._forget(slot)
        ticket.fail(error, self.outbox)

    def _fail_all(self, batch: Batch, error: StepError) -> None:
        """Of a call that failed. Others go on, and what they hold stays."""
        _said(error)
        for part in batch.parts:
            self._fail(part.slot, error)
        # rows of a sliding window may have gone before the call failed: then no sequence can be taken out
        if not all(self.session.seq_rm(part.slot.seq) for part in batch.parts):
            for slot in self.running:
                self._fail(slot, error)
            self.session.clear()
            for slot in self.slots:
                slot.tokens, slot.shifted_at, slot.lent = [], None, 0

    def _forget(self, slot: Slot) -> None:
        self.session.seq_rm(slot.seq)
        slot.tokens, slot.shifted_at, slot.lent = [], None, 0

    def _touch(self, slot: Slot) -> None:
        self._turn += 1
        slot.used = self._turn


def _age(slot: Slot) -> int:
    return slot.used


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)


def _said(error: StepError) -> StepError:
    """Whoever runs the server reads of it too."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    return error
