"""An answer as a stream of text pieces: the part that plain and chat completions share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from latentkv.errors import expected
from latentkv.generate.loop import LogitsProcessor, StoppingCriteria, token_loop
from latentkv.ranges import integer
from latentkv.sampling.logprobs import TokenScore, best, log_softmax
from latentkv.sampling.options import SamplingOptions
from latentkv.session.turns import step_by_step
from latentkv.text import StopMatcher, Utf8Stream

if TYPE_CHECKING:
    from latentkv.open_model import OpenModel


@dataclass(frozen=True)
class Piece:
    """Text that can be shown, the tokens that begin in it, and, in the last piece, why the answer ended."""

    text: str
    tokens: tuple[TokenScore, ...] = ()
    finish_reason: str | None = None


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

    def _score_prompt(self) -> list[TokenScore]:
        """Evaluates the prompt from scratch."""
        self._model.truncate(0)
        logits = self._model.compute_all(self._prompt)
        text, scores = Utf8Stream(), []
        offset = 0
        for i, token in enumerate(self._prompt):
            scores.append(self._score(token, self._piece(token), offset, logits[i - 1] if i else None))
            offset += len(text.push(scores[-1].piece))
        return scores

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
        scores = [] if self._options.logprobs is None else self._score_prompt()
        return Piece(text, tuple(replace(score, offset=score.offset - len(text)) for score in scores))

    def _until_the_end(self) -> Iterator[Piece]:
        self._loop.start(self._prompt)
        while True:
            token = self._loop.next(self.limit - self.completion_tokens)
            if self._model.model.is_eog(token):
                yield self._text.end("stop")
                return
            self.completion_tokens += 1
            piece = self._piece(token)
            self._loop.wrote(piece)
            logits = None if self._options.logprobs is None else self._loop.logits
            shown = self._text.push(self._score(token, piece, self._text.length, logits))
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

    def _piece(self, token: int) -> bytes:
        return self._model.model.token_to_piece(token, token in self._options.shown)

    def _score(self, token: int, piece: bytes, offset: int, logits: NDArray[np.float32] | None) -> TokenScore:
        if logits is None or self._options.logprobs is None:
            return TokenScore(token, piece, offset)
        logprobs = log_softmax(logits)
        rivals = [(self._piece(i), float(logprobs[i])) for i in best(logprobs, self._options.logprobs)]
        return TokenScore(token, piece, offset, float(logprobs[token]), rivals)


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
        return Piece(piece.text, piece.tokens + tuple(() if stopped else self._waiting), piece.finish_reason)

    def _release(self, text: str, reason: str | None) -> Piece:
        self._shown += len(text)
        released = [token for token in self._waiting if token.offset < self._shown]
        self._waiting = [token for token in self._waiting if token.offset >= self._shown]
        return Piece(text, tuple(released), reason)
