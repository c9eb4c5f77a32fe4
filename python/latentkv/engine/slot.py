"""A sequence of the cache, and the answer that is being written in it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from latentkv import _core
from latentkv.engine.lines import Lines
from latentkv.engine.request import Request, Ticket
from latentkv.generate.scores import PromptScores, drawn_score, token_score
from latentkv.generate.writer import AnswerWriter, Piece
from latentkv.sampling.closing import closing_of
from latentkv.sampling.logprobs import TokenScore
from latentkv.session.pool import Pool

Drawn = tuple[int, bytes, bool] | str  # a token, its bytes, whether it ends an answer; or why there is none


class Job:
    """One request in a slot: what is left of its prompt, then one token after another."""

    def __init__(
        self, model: _core.Model, ticket: Ticket, cached: int, limit: int, hard_limit: int, n_ctx: int
    ) -> None:
        """limit: tokens of the answer that there is room for now, of hard_limit in all. n_ctx: tokens that a
        sequence may have."""
        request = ticket.request
        sampling = request.sampling.within(n_ctx)
        self.ticket, self.limit, self.hard_limit = ticket, limit, hard_limit
        self.pending = list(request.prompt[cached:])  # to be evaluated
        self.has_read = False  # all of the prompt
        self._model = model
        self.sampler = sampling.sampler(model)
        self._closing = closing_of(model, request.sampling.grammar)
        score = partial(_score, model, self.sampler, request)
        is_scored = request.logprobs is not None or request.with_tokens
        self._writer = AnswerWriter(
            request.stop, score if is_scored else None, self._closing, request.ignore_eos
        )
        self._lines = None if request.lines is None else Lines(request.lines)
        self._prompt = (
            PromptScores(model, request.prompt, request.logprobs or 0, range(model.n_vocab))
            if request.scores_prompt
            else None
        )
        self._pool = None if request.pooling is None else Pool(request.pooling, len(request.prompt))
        self._begin = time.perf_counter()
        timings = ticket.progress.timings
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
        """Flags for the next `count` tokens of the prompt: whether their results are wanted."""
        if self._pool is not None:
            return self._pool.wanted(len(self.ticket.request.prompt) - len(self.pending), count)
        if self.scores:
            return [True] * count
        return [False] * (count - 1) + [count == len(self.pending)]

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
            is_all = self.limit == 0 and not self.pending
            return Piece("", (), "length") if is_all else None
        self.score(logits)
        if self.pending:
            return None
        text = self._prompt.text
        return Piece(text, self._prompt.before(len(text)), "length" if self.limit == 0 else None)

    def _embedded(self, pool: Pool, states: NDArray[np.float32]) -> Piece | None:
        pool.add(states)
        if self.pending:
            return None
        self.ticket.progress.embedding = pool.result()
        return Piece("", (), "stop")

    def may_be(self, logits: NDArray[np.float32]) -> NDArray[np.float32] | None:
        """The logits [n_vocab] to draw from in place of these: where the answer has to be closed."""
        if self._closing is None:
            return None
        return self._closing.applied(logits, self.hard_limit - self.ticket.progress.completion_tokens)

    def advance(self, drawn: Drawn, logits: NDArray[np.float32]) -> Piece:
        """Takes what was drawn after the last token of `pending`, which was evaluated; what can be shown
        now, and in the last one why the answer ends.

        logits: [n_vocab]
        """
        if isinstance(drawn, str):
            raise _core.Error(drawn)
        token, piece, is_end = drawn
        now = time.perf_counter()
        progress, timings, request = self.ticket.progress, self.ticket.progress.timings, self.ticket.request
        if not self.has_read:
            self.has_read = True
            timings.prompt_s, self._begin = now - self._begin, now
        else:
            timings.predicted_n += 1
            timings.predicted_s = now - self._begin
        if token in request.shown:
            piece = self._model.token_to_piece(token, True)
        shown = self._writer.write(token, piece, is_end, logits)
        if self._writer.completion_tokens == progress.completion_tokens:  # it was not written
            progress.end = token
            return shown
        progress.completion_tokens += 1
        progress.tokens.append(token)
        if self._lines is not None and shown.finish_reason is None:
            kept = self._lines.push(shown.text, timings.predicted_s)
            if kept is not None:
                return Piece(shown.text[:kept], shown.tokens, "length")
        if shown.finish_reason is None and progress.completion_tokens >= self.limit:
            end = self._writer.end("length")
            shown = Piece(shown.text + end.text, shown.tokens + end.tokens, end.finish_reason)
        self.pending = [token]
        return shown


# No method of Job: a writer that held its job would be part of a circle.
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


def drawn(jobs: Sequence[Job], logits: NDArray[np.float32], rows: Sequence[int]) -> list[Drawn]:
    """What comes next in each answer, after its row of the logits [n, n_vocab]. One call for all, without
    the GIL: the thread that sends what came before goes on meanwhile."""
    changed = [job.may_be(logits[row]) for job, row in zip(jobs, rows, strict=True)]
    if any(row is not None for row in changed):
        pairs = zip(changed, rows, strict=True)
        logits = np.stack([logits[row] if own is None else own for own, row in pairs])
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
        left = self.job.limit - self.job.ticket.progress.completion_tokens
        return len(self.job.pending) + max(0, left - 1)
