"""A sequence of the cache, and the answer that is being written in it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from latentkv.answer import AnswerText, Piece
from latentkv.engine.request import Ticket
from latentkv.logprobs import TokenScore, best, log_softmax

if TYPE_CHECKING:
    from latentkv import _core


class Job:
    """One request in a slot: what is left of its prompt, then one token after another."""

    def __init__(
        self, model: _core.Model, ticket: Ticket, cached: int, limit: int, hard_limit: int, last_n: int
    ) -> None:
        """limit: tokens of the answer that there is room for now, of hard_limit in all."""
        request = ticket.request
        self.ticket, self.limit, self.hard_limit = ticket, limit, hard_limit
        self.pending = list(request.prompt[cached:])  # to be evaluated
        self.has_read = False  # all of the prompt
        self._model = model
        self._sampler = request.sampling.sampler(model)
        self._text = AnswerText(request.stop)
        self._begin = time.perf_counter()
        timings = ticket.progress.timings
        timings.cached_n, timings.prompt_n = cached, len(self.pending)
        for token in request.prompt[max(0, len(request.prompt) - last_n) :]:
            self._sampler.accept(token, in_grammar=False)

    def advance(self, logits: NDArray[np.float32]) -> Piece:
        """Samples after the last token of `pending`, which was evaluated; what can be shown now, and in the
        last one why the answer ends.

        logits: [n_vocab]
        """
        now = time.perf_counter()
        progress, timings, request = self.ticket.progress, self.ticket.progress.timings, self.ticket.request
        if not self.has_read:
            self.has_read = True
            timings.prompt_s, self._begin = now - self._begin, now
        else:
            timings.predicted_n += 1
            timings.predicted_s = now - self._begin
        token = self._sampler.sample(logits)
        self._sampler.accept(token)
        if self._model.is_eog(token) and not request.ignore_eos:
            return self._text.end("stop")
        progress.completion_tokens += 1
        shown = self._text.push(self._scored(token, logits))
        if shown.finish_reason is None and progress.completion_tokens >= self.limit:
            end = self._text.end("length")
            shown = Piece(shown.text + end.text, shown.tokens + end.tokens, end.finish_reason)
        self.pending = [token]
        return shown

    def _scored(self, token: int, logits: NDArray[np.float32]) -> TokenScore:
        piece, count = self._model.token_to_piece(token), self.ticket.request.logprobs
        if count is None:
            return TokenScore(token, piece, self._text.length)
        logprobs = log_softmax(logits)
        rivals = [
            (self._model.token_to_piece(other), float(logprobs[other])) for other in best(logprobs, count)
        ]
        return TokenScore(token, piece, self._text.length, float(logprobs[token]), rivals)


@dataclass
class Slot:
    """`tokens` are what sequence `seq` of the cache holds; the cache is the truth after an interrupted
    call."""

    seq: int
    tokens: list[int] = field(default_factory=list)
    job: Job | None = None
    used: int = 0  # when it last had a job, in jobs

    @property
    def has_read(self) -> bool:
        """Whether its job has read its prompt."""
        return self.job is not None and self.job.has_read

    @property
    def reserved(self) -> int:
        """Cells that its job may still take: the rest of the prompt and of the answer. The last token is
        sampled, not evaluated."""
        if self.job is None:
            return 0
        left = self.job.limit - self.job.ticket.progress.completion_tokens
        return len(self.job.pending) + max(0, left - 1)
