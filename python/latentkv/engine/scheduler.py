"""Which tokens go through the model next: those of all answers that are being written, and pieces of the
prompts that wait to be read.

One step is one decode call, and one more for texts to embed, whose results are of another kind. Every answer
gets its token in every step; prompts share what room is left in it, all alike. Texts to embed get as much
time as the answers beside them, a few tokens at once. Nothing here knows threads: `Engine` calls step() on
one.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from latentkv.console.printable import printable
from latentkv.engine.admission import Admission
from latentkv.engine.batch import Batch, Part
from latentkv.engine.counters import Counters
from latentkv.engine.drafting import Drafting
from latentkv.engine.outbox import Outbox
from latentkv.engine.request import StepError, Ticket, TooLong
from latentkv.engine.reuse import Reuse
from latentkv.engine.room import Room, age
from latentkv.engine.sequences import Sequences
from latentkv.engine.shift import Shift
from latentkv.engine.slot import Job, Slot, drawn
from latentkv.engine.store import PrefixStore
from latentkv.errors import expected
from latentkv.generate.writer import Piece

if TYPE_CHECKING:
    from latentkv import _core

MIXED_CHUNK = 128  # prompt tokens of a step that answers wait for
LEAST_CHUNK = 32  # of a prompt, in a step: fewer tokens do not fill a matrix product
EMBEDDED_CHUNK = 32  # tokens to embed, in a step that answers wait for


class Scheduler:
    """Requests over the sequences of one session. `Admission` says which of them run."""

    def __init__(
        self,
        model: _core.Model,
        session: _core.Session,
        *,
        n_batch: int = 2048,
        n_ctx_seq: int | None = None,
        shift: Shift | None = None,
        store: PrefixStore | None = None,
        reuse: Reuse | None = None,
        drafting: Drafting | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """n_ctx_seq: tokens that a sequence may have (None: all of the cache).
        shift: what becomes of a sequence that has as many (None: its answer ends).
        store: where sequences go that lose their place (None: they are forgotten).
        reuse: of chunks further on in a sequence (None: what a prompt does not begin with is computed).
        drafting: what guesses tokens of answers (None: nothing).
        """
        self.model, self.session, self.n_batch = model, session, n_batch
        self.n_ctx_seq = min(n_ctx_seq or session.n_ctx, session.n_ctx)
        self._n_step = min(n_batch, session.n_ubatch)  # of prompts: others wait until they are read
        self.waiting: deque[Ticket] = deque()
        self.counters = Counters()
        self.outbox = Outbox()
        self.store, self.drafting = store, drafting
        self.sequences = Sequences(session, shift, reuse)
        self.room = Room(self.sequences, store, self.n_ctx_seq, self.counters)
        self.admission = Admission(self.room)
        self._is_lazy = session.prefill == "lazy"
        self._clock = clock
        self._read_for: tuple[Ticket, ...] = ()  # those of the decode call that runs, if it reads prompts
        self._why: Exception = StepError("[engine] expected a step that runs; got an interrupt")
        self._ahead = 0.0  # seconds that texts to embed had more than the answers beside them

    @property
    def slots(self) -> list[Slot]:
        return self.sequences.slots

    @property
    def running(self) -> list[Slot]:
        return self.sequences.running

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
            raise TooLong(count, self.n_ctx_seq, f"{count}")

    def submit(self, ticket: Ticket) -> None:
        self.waiting.append(ticket)

    def step(self) -> bool:
        """Runs a decode call for answers, and one for texts to embed; False when there was nothing to do."""
        self._drop_cancelled()
        self._admit()
        has_run = is_awaited = False
        for embeds in (False, True):  # a call has one kind of result
            is_awaited = is_awaited or any(slot.has_read for slot in self.running)
            if embeds and is_awaited and self._ahead > 0:
                break
            batch = self._batch(embeds, is_awaited)
            begin = self._clock()
            if batch.tokens:
                self._run(batch)
                has_run = True
            seconds = self._clock() - begin
            self._ahead = max(0.0, self._ahead + (seconds if embeds else -seconds)) if is_awaited else 0.0
        return has_run

    def _run(self, batch: Batch) -> None:
        self.counters.steps += 1
        self.counters.step_tokens += len(batch.tokens)
        self.counters.step_slots += len(batch.parts)
        jobs = [part.slot.job for part in batch.parts if part.slot.job is not None]
        self._read_for = tuple(job.ticket for job in jobs) if any(not job.has_read for job in jobs) else ()
        try:
            rows = self._decode(batch)
        except KeyboardInterrupt:  # of leave_off()
            self._end_all(batch, self._why)
            return
        except Exception as error:
            self._fail_all(batch, _said(StepError.of(error)))
            return
        finally:
            self._read_for = ()
        self._advance([part for part in batch.parts if self._has_read(part, rows)], rows)

    def _decode(self, batch: Batch) -> NDArray[np.float32]:
        """Logits of what wanted them, [n, n_vocab], or hidden states, [n, n_embd]. A prompt that is scored or
        embedded in one call takes them piece by piece, as all of them may be gigabytes; the last row of
        logits is returned then, and no states."""
        job = batch.parts[0].slot.job
        given: dict[str, Any] = {"seq": batch.seqs, "output": batch.output, "states": batch.embeds}
        given["guessed"] = batch.guessed
        is_long = self._is_lazy and len(batch.parts) == 1
        if job is None or not is_long or not (job.scores or job.embeds):
            return self.session.decode(batch.tokens, **given)
        last: list[NDArray[np.float32]] = []

        def take(rows: NDArray[np.float32]) -> None:
            job.take(rows)
            last[:] = [rows[:0] if job.embeds else rows[-1:].copy()]

        self.session.decode(batch.tokens, **given, take=take)
        batch.parts[0] = replace(batch.parts[0], last=len(last[0]))
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
            self.room.grow(slot)
        except Exception as error:
            self._fail(slot, _said(StepError.of(error)))
            return False
        return True

    def _advance(self, parts: Sequence[Part], logits: NDArray[np.float32]) -> None:
        """The next token of each, all drawn in one call; then that behind each guess that came true, and so
        on. What is drawn is what would be drawn without guesses."""
        n_true = 0
        while parts:
            jobs = [part.slot.job for part in parts if part.slot.job is not None]
            rows = [part.row + n_true for part in parts]
            going = []
            for part, job, row, token in zip(parts, jobs, rows, drawn(jobs, logits, rows), strict=True):
                seconds = self.counters.next_token if job.has_read else self.counters.first_token
                try:
                    piece = job.advance(token, logits[row])
                    seconds.add(job.gap)
                    self._show(part.slot, piece)
                    if self._comes_true(part, job, n_true):
                        going.append(part)
                except Exception as error:
                    self._fail(part.slot, _said(StepError.of(error)))
            parts, n_true = going, n_true + 1

    def _comes_true(self, part: Part, job: Job, n_true: int) -> bool:
        """Whether a job has drawn the guess behind the `n_true` first ones, and goes on. Else the cache gives
        back the guesses that are left."""
        slot, guesses, timings = part.slot, part.guesses[n_true:], job.ticket.progress.timings
        if not guesses:
            return False
        timings.draft_n += len(guesses) if n_true == 0 else 0
        if slot.job is not None and job.pending == [guesses[0]]:
            timings.draft_n_accepted += 1
            slot.tokens.append(job.pending.pop())
            return True
        job.pending = self.sequences.take_back(slot) + job.pending
        return False

    def _show(self, slot: Slot, piece: Piece) -> None:
        assert slot.job is not None
        ticket = slot.job.ticket
        if piece.finish_reason is not None:
            self._finish(slot)
        if piece.text or piece.tokens or piece.finish_reason is not None:
            ticket.put(piece, self.outbox)

    def _batch(self, embeds: bool, is_awaited: bool) -> Batch:
        """is_awaited: answers get tokens in this step."""
        batch = Batch(embeds)
        reading = [slot for slot in self.running if not slot.has_read and slot.embeds == embeds]
        reading.sort(key=age)
        fresh = [slot for slot in reading if not slot.tokens]
        if self._is_lazy and fresh:  # exact K and V of a prompt: in a call in which every sequence starts
            batch.add(fresh[0], self.session.n_ctx)
            return batch
        if not embeds:
            self._write(batch)
        beside = EMBEDDED_CHUNK if embeds else MIXED_CHUNK
        self._read(batch, reading, beside if is_awaited else self._n_step)
        return batch

    def _write(self, batch: Batch) -> None:
        """Adds the tokens of answers to a batch, and guesses of the next ones."""
        answers = [slot for slot in self.running if slot.has_read]
        step = None if self.drafting is None else self.drafting.step(len(answers))
        for slot in answers:
            assert slot.job is not None
            guesses: Sequence[int] = ()
            if self.drafting is not None and step is not None and len(slot.job.pending) <= MIXED_CHUNK:
                guesses = self.drafting.guesses(slot, step)
            batch.add(slot, MIXED_CHUNK, guesses)

    def _read(self, batch: Batch, reading: Sequence[Slot], room: int) -> None:
        """Adds tokens of prompts to a batch, `room` at most."""
        share = room // max(1, min(len(reading), room // LEAST_CHUNK))
        scored = MIXED_CHUNK  # tokens of a step, of all prompts: the logits of each are a row of n_vocab
        for slot in reading:
            assert slot.job is not None
            count = min(share, room, len(slot.job.pending))
            if slot.job.scores:
                count = min(count, scored)
                scored -= count
            if count:
                batch.add(slot, count)
            room -= count

    def erase(self, seq: int) -> int:
        """Forgets what an idle sequence holds; how many tokens that were. Raises LatentKVError while it
        answers."""
        slot = self.slots[seq]
        if slot.job is not None:
            raise expected("slot", "an idle one", f"{seq}, which writes an answer")
        count = len(slot.tokens)
        self.sequences.forget(slot)
        return count

    def leave_off(self, why: Exception | None = None) -> None:
        """Ends a decode call that reads prompts, with an error or because its requests are cancelled: a call
        takes seconds, and that of a long prompt minutes. Any thread may call it."""
        if self._read_for and (why is not None or all(ticket.cancelled for ticket in self._read_for)):
            self._why = why or StepError("[engine] expected requests; got none that is wanted")
            self.session.interrupt()

    def abandon(self, error: Exception) -> None:
        """Ends everything that runs or waits."""
        for slot in self.running:
            self._fail(slot, error)
        while self.waiting:
            self.waiting.popleft().fail(error, self.outbox)

    def close(self, error: Exception) -> None:
        """Ends everything, and keeps what sequences hold."""
        for slot in self.running:
            assert slot.job is not None
            ticket = slot.job.ticket
            self._finish(slot)
            ticket.fail(error, self.outbox)
        self.abandon(error)
        self.room.close_store()

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
            n_embedding = sum(slot.embeds for slot in self.running)
            if ticket.request.pooling is not None and n_embedding >= max(1, len(self.slots) // 2):
                continue  # answers find a sequence after any number of texts
            idle = [slot for slot in idle if ticket.request.slot in (-1, slot.seq)]
            if not idle or self.admission.waits(idle, ticket):
                n_passed += 1
                continue
            if not self._start(idle, ticket):
                return
            self.waiting.remove(ticket)

    def _start(self, idle: list[Slot], ticket: Ticket) -> bool:
        """Gives the request a sequence, if there is room for it."""
        placed = self.admission.place(idle, ticket)
        if placed is None:
            return False
        slot, keep, limit, hard = placed
        try:
            slot.job = Job(self.model, ticket, keep, limit, hard, self.n_ctx_seq)
        except Exception as error:
            ticket.fail(error, self.outbox)
            return True
        self.sequences.touch(slot)
        ticket.progress.slot = slot.seq
        self.counters.requests += 1
        return True

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
        counters.drafted_tokens += timings.draft_n
        counters.accepted_tokens += timings.draft_n_accepted
        if self.drafting is not None and not slot.embeds:
            self.drafting.finish(slot.job)
        counters.longest = max(counters.longest, progress.prompt_tokens + progress.completion_tokens)
        embeds, slot.job = slot.embeds, None
        self.sequences.touch(slot)
        if embeds:  # nothing goes on from it
            self.sequences.forget(slot)

    def _fail(self, slot: Slot, error: Exception) -> None:
        """What its sequence holds is not known to be whole."""
        assert slot.job is not None
        ticket = slot.job.ticket
        self._finish(slot)
        self.sequences.forget(slot)
        ticket.fail(error, self.outbox)

    def _end_all(self, batch: Batch, error: Exception) -> None:
        """Ends the requests of a call that was left off. What the cache has of their prompts stays."""
        for part in batch.parts:
            slot, job = part.slot, part.slot.job
            assert job is not None
            known = slot.tokens + job.pending
            self._finish(slot)
            held = self.session.seq_pos_max(slot.seq) + 1
            slot.tokens = known[:held]
            if held > len(known):  # guesses
                self.sequences.take_back(slot)
            job.ticket.fail(error, self.outbox)

    def _fail_all(self, batch: Batch, error: Exception) -> None:
        """Ends the requests of a call that failed. Others go on, and keep what they hold."""
        for part in batch.parts:
            self._fail(part.slot, error)
        # rows of a sliding window may have gone before the call failed: then no sequence can be taken out
        if not all(self.session.seq_rm(part.slot.seq) for part in batch.parts):
            for slot in self.running:
                self._fail(slot, error)
            self.session.clear()
            for slot in self.slots:
                self.sequences.is_empty(slot)


def _said(error: StepError) -> StepError:
    """The error, which is also printed for the server's operator."""
    print(f"error: {printable(str(error))}", file=sys.stderr, flush=True)
    return error
