"""An answer as a stream of text pieces: the part that plain and chat completions share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from latentkv.errors import expected
from latentkv.generate.loop import LogitsProcessor, StoppingCriteria, token_loop
from latentkv.generate.scores import PromptScores, token_score
from latentkv.ranges import integer
from latentkv.sampling.logprobs import TokenScore
from latentkv.sampling.options import SamplingOptions
from latentkv.session.turns import step_by_step
from latentkv.text import StopMatcher, Utf8Stream

if TYPE_CHECKING:
    from latentkv.open_model import OpenModel


@dataclass(frozen=True)
class Piece:
    """Text that can be shown, the tokens that begin in it, and, in the last piece, why the answer ended:
    "length", or "stop", with the stop string if it was one."""

    text: str
    tokens: tuple[TokenScore, ...] = ()
    finish_reason: str | None = None
    stopping_word: str | None = None


@dataclass(frozen=True)
class AnswerOptions:
    """When to stop, and what to report. `max_tokens` below 1 means: until the context is full."""

    max_tokens: int | None = 16
    stop: Sequence[str] = ()
    logprobs: int | None = None  # rivals reported per token; None: no log-probabilities
    processor: LogitsProcessor | None = None
    stopping: StoppingCriteria | None = None
    shown: frozenset[int] = frozenset()  # special tokens whose text is part of the answer
    echo: str | None = None  # the prompt's text, which the first piece repeats


class Answer:
    """Iterate for the pieces. `completion_tokens` counts what was generated so far, the end token
    excluded."""

    def __init__(
        self, model: OpenModel, prompt: Sequence[int], sampling: SamplingOptions, options: AnswerOptions
    ) -> None:
        n_ctx = model.n_ctx()
        if len(prompt) >= n_ctx:
            raise expected(
                "context", f"a prompt of at most {n_ctx - 1} tokens", len(prompt), "raise -c / n_ctx"
            )
        room = n_ctx - len(prompt)
        asked = 0 if options.max_tokens is None else integer("max_tokens", options.max_tokens)
        self.limit = min(asked, room) if asked > 0 else room
        self.prompt_tokens = len(prompt)
        self.completion_tokens = 0
        self._model = model
        self._prompt = prompt
        self._options = options
        self._loop = token_loop(model, sampling, options.processor)
        self._text = AnswerText(options.stop)

    def __iter__(self) -> Iterator[Piece]:
        return step_by_step(self._model, self._pieces())

    def _pieces(self) -> Iterator[Piece]:
        try:
            self._loop.hold()
            if self._options.echo is not None:
                yield self._echo(self._options.echo)
            else:
                self._model.recall(self._prompt)
            yield from self._until_the_end()
            self._loop.settle()
            self._model.remember()
        finally:
            self._loop.finish()

    def _echo(self, text: str) -> Piece:
        """The prompt, at offsets below 0, and with `logprobs` what its tokens score."""
        if self._options.logprobs is None:
            return Piece(text)
        scores = PromptScores(self._model.model, self._prompt, self._options.logprobs, self._options.shown)
        self._model.truncate(0)
        self._model.compute_each(self._prompt, scores.add)
        return Piece(text, scores.before(len(text)))

    def _until_the_end(self) -> Iterator[Piece]:
        self._loop.start(self._prompt)
        while True:
            token = self._loop.next(self.limit - self.completion_tokens)
            if self._model.model.is_eog(token):
                yield self._text.end("stop")
                return
            self.completion_tokens += 1
            score = token_score(
                self._model.model,
                token,
                self._text.length,
                None if self._options.logprobs is None else self._loop.logits,
                self._options.logprobs,
                self._options.shown,
            )
            self._loop.wrote(score.piece)
            shown = self._text.push(score)
            if shown.finish_reason is not None:
                yield shown
                return
            if shown.text or shown.tokens:
                yield shown
            if self._stop_asked(token):
                yield self._text.end("stop")
                return
            if self.completion_tokens == self.limit:
                yield self._text.end("length")
                return
            self._loop.push([token])

    def _stop_asked(self, token: int) -> bool:
        stopping = self._options.stopping
        return stopping is not None and stopping(
            np.append(self._loop.input_ids, np.intc(token)), self._loop.logits
        )


@dataclass
class AnswerText:
    """Decodes pieces, cuts at stop strings, and releases each token with the text it begins in."""

    stop: Sequence[str]
    length: int = 0  # characters decoded
    _shown: int = 0  # characters released
    _waiting: list[TokenScore] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._utf8 = Utf8Stream()
        self._stops = StopMatcher(self.stop)

    def push_bytes(self, piece: bytes) -> Piece:
        """push() of a token that nobody wants to see beside its text."""
        decoded = self._utf8.push(piece)
        self.length += len(decoded)
        if not self.stop:
            self._shown += len(decoded)
            return Piece(decoded)
        text, stopped = self._stops.push(decoded)
        return self._release(text, "stop" if stopped else None)

    def push(self, token: TokenScore) -> Piece:
        decoded = self._utf8.push(token.piece)
        self.length += len(decoded)
        self._waiting.append(token)
        text, stopped = self._stops.push(decoded)
        return self._release(text, "stop" if stopped else None)

    def end(self, reason: str) -> Piece:
        tail, stopped = self._stops.push(self._utf8.flush())
        if not stopped:
            tail += self._stops.flush()
        piece = self._release(tail, "stop" if stopped else reason)
        waiting = () if stopped else tuple(self._waiting)
        return replace(piece, tokens=piece.tokens + waiting)

    def _release(self, text: str, reason: str | None) -> Piece:
        self._shown += len(text)
        released = [token for token in self._waiting if token.offset < self._shown]
        self._waiting = [token for token in self._waiting if token.offset >= self._shown]
        return Piece(text, tuple(released), reason, self._stops.found)
