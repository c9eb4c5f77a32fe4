"""A sequence of the cache, and the answer that is being written in it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from latentkv import _core
from latentkv.chat.thoughts import ThoughtCloser
from latentkv.drafts.lookup import Lookup
from latentkv.engine.lines import Lines
from latentkv.engine.request import Request, Ticket
from latentkv.generate.scores import PromptScores, drawn_score, token_score
from latentkv.generate.writer import AnswerWriter, Drawn, Ends, Piece
from latentkv.sampling.closing import closing_of
from latentkv.sampling.logprobs import TokenScore
from latentkv.session.pool import Pool
from latentkv.session.timings import Timings


class Job:
    """One request in a slot: what is left of its prompt, then one token after another."""

    def __init__(
        self, model: _core.Model, ticket: Ticket, cached: int, limit: int, hard_limit: int, n_ctx: int
    ) -> None:
        """limit: tokens of the answer that there is room for now, of hard_limit in all. n_ctx: tokens that a
        sequence may have."""
        request = ticket.request
        sampling = request.sampling.within(n_ctx)
        self.ticket = ticket
        self.pending = list(request.prompt[cached:])  # to be evaluated
        self.has_read = False  # all of the prompt
        self.sampler = sampling.sampler(model)
        timings = ticket.progress.timings
        cut = None if request.lines is None else partial(_cut, Lines(request.lines), timings)
        is_scored = request.logprobs is not None or request.with_tokens
        self.writer = AnswerWriter(
            Ends(request.stop, request.ignore_eos, cut),
            limit,
            hard_limit,
            partial(_score, model, self.sampler, request) if is_scored else None,
            closing_of(model, request.sampling.grammar),
            {token: model.token_to_piece(token, True) for token in request.shown},
            None if request.thoughts is None else ThoughtCloser(model, request.thoughts),
        )
        ticket.progress.tokens = self.writer.tokens
        self.lookup: Lookup | None = None  # what guesses its tokens, once it has been asked
        self._prompt = (
            PromptScores(model, request.prompt, request.logprobs or 0, range(model.n_vocab))
            if request.scores_prompt
            else None
        )
        self._pool = None if request.pooling is None else Pool(request.pooling, len(request.prompt))
        self._begin = time.perf_counter()
        self._latest = ticket.since
        self.gap = 0.0  # seconds before its latest token
        timings.cached_n, timings.prompt_n = cached, len(self.pending)
        for token in request.prompt[max(0, len(request.prompt) - sampling.n_seen) :]:
            self.sampler.accept(token, in_grammar=False)

    @property
    def scores(self) -> bool:
        """Whether it wants logits of every token that it reads now."""
        return self._prompt is not None and not self.has_read

    @property
    def embeds(self) -> bool:
        return self._pool is not None

    def wanted(self, count: int) -> list[bool]:
        """Flags for the next `count` tokens that wait: whether their results are wanted."""
        if self._pool is not None:
            return self._pool.wanted(len(self.ticket.request.prompt) - len(self.pending), count)
        if self.scores:
            return [True] * count
        flags = [False] * (count - 1) + [count == len(self.pending)]
        flags[0] = flags[0] or self.has_read  # an answer's tokens, computed once more, are no prompt
        return flags

    def take(self, rows: NDArray[np.float32]) -> None:
        """Takes what it wanted of the next tokens of its prompt, where it is not the last of them alone."""
        if self._pool is not None:
            self._pool.add(rows)
        else:
            self.score(rows)

    def score(self, logits: NDArray[np.float32]) -> None:
        """Takes the logits [n, n_vocab] of the next n tokens of a prompt that is scored; those after its end
        are left."""
        assert self._prompt is not None
        self._prompt.add(logits)

    def read(self, logits: NDArray[np.float32]) -> Piece | None:
        """Takes the logits [n, n_vocab] of n prompt tokens; the scored prompt after the last of them."""
        if self.has_read:
            return None
        if not self.pending:
            self.ticket.progress.timings.prompt_s = time.perf_counter() - self._begin
        if self._pool is not None:
            return self._embedded(self._pool, logits)
        if self._prompt is None:
            is_all = self.writer.limit == 0 and not self.pending
            return Piece("", (), "length") if is_all else None
        self.score(logits)
        if self.pending:
            return None
        text = self._prompt.text
        return Piece(text, self._prompt.before(len(text)), "length" if self.writer.limit == 0 else None)

    def _embedded(self, pool: Pool, states: NDArray[np.float32]) -> Piece | None:
        pool.add(states)
        if self.pending:
            return None
        self.ticket.progress.embedding = pool.result()
        return Piece("", (), "stop")

    def advance(self, drawn: Drawn | str, logits: NDArray[np.float32]) -> Piece:
        """Takes what was drawn after the last token of `pending`, which was evaluated, or why there is
        nothing; what can be shown now, and in the last one why the answer ends.

        logits: [n_vocab]
        """
        if isinstance(drawn, str):
            raise _core.Error(drawn)
        now, timings = time.perf_counter(), self.ticket.progress.timings
        self.gap, self._latest = now - self._latest, now
        if not self.has_read:
            self.has_read = True
            timings.prompt_s, self._begin = now - self._begin, now
        else:
            timings.predicted_n += 1
            timings.predicted_s = now - self._begin
        shown = self.writer.step(drawn, logits)
        if self.lookup is not None:
            self.lookup.push(drawn[0])
        self.ticket.progress.end = self.writer.end
        self.pending = [drawn[0]]
        return shown


# No methods of Job: a writer that held its job would be part of a circle.
def _score(
    model: _core.Model,
    sampler: _core.Sampler,
    request: Request,
    token: int,
    at: int,
    logits: NDArray[np.float32] | None,
) -> TokenScore:
    if request.behind_samplers and request.logprobs is not None:
        return drawn_score(model, sampler, token, at, request.logprobs, request.shown)
    return token_score(model, token, at, logits, request.logprobs, request.shown)


def _cut(lines: Lines, timings: Timings, text: str) -> int | None:
    return lines.push(text, timings.predicted_s)


def drawn(jobs: Sequence[Job], logits: NDArray[np.float32], rows: Sequence[int]) -> list[Drawn | str]:
    """What comes next in each answer, after its row of the logits [n, n_vocab]. One call for all, without
    the GIL: the thread that sends what came before goes on meanwhile."""
    if any(job.writer.closes for job in jobs):
        logits = np.stack([job.writer.closed(logits[row]) for job, row in zip(jobs, rows, strict=True)])
        rows = range(len(jobs))
    return _core.next_tokens([job.sampler for job in jobs], logits, rows)


@dataclass
class Slot:
    """`tokens` are what sequence `seq` of the cache holds; the cache is the truth after an interrupted
    call."""

    seq: int
    tokens: list[int] = field(default_factory=list)
    job: Job | None = None
    used: int = 0  # when it last had a job, in jobs
    shifted_at: int | None = None  # tokens from here on were computed after some that are gone
    lent: int = 0  # of its tokens, how many another sequence may hold too
    salt: str = ""  # of the request that its tokens came with

    @property
    def has_read(self) -> bool:
        """Whether its job has read its prompt."""
        return self.job is not None and self.job.has_read

    @property
    def embeds(self) -> bool:
        return self.job is not None and self.job.embeds

    @property
    def reserved(self) -> int:
        """Cells that its job may still take: the rest of the prompt and of the answer. The last token is
        sampled, not evaluated."""
        if self.job is None:
            return 0
        return len(self.job.pending) + max(0, self.job.writer.left - 1)
