"""Drawn tokens become pieces of an answer: text that can be shown, and at its end why it ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from latentkv.sampling.closing import JsonClosing
from latentkv.sampling.logprobs import TokenScore
from latentkv.text import StopMatcher, Utf8Stream

# (token, characters before it, logits [n_vocab] before it)
Score = Callable[[int, int, NDArray[np.float32] | None], TokenScore]


@dataclass(frozen=True)
class Piece:
    """Text that can be shown, the tokens that begin in it, and, in the last piece, why the answer ended:
    "length", or "stop", with the stop string if it was one."""

    text: str
    tokens: tuple[TokenScore, ...] = ()
    finish_reason: str | None = None
    stopping_word: str | None = None


class AnswerWriter:
    """One answer. `completion_tokens` counts what was written so far, the end token excluded."""

    def __init__(
        self,
        stop: Sequence[str],
        score: Score | None,
        closing: JsonClosing | None = None,
        ignores_end: bool = False,
    ) -> None:
        """score: of a token that is shown beside its text; None: texts alone. closing: is told what was
        written. ignores_end: an end token is written like any other."""
        self._text = AnswerText(stop)
        self._score, self._closing, self._ignores_end = score, closing, ignores_end
        self.completion_tokens = 0

    def write(self, token: int, piece: bytes, is_end: bool, logits: NDArray[np.float32] | None) -> Piece:
        """What a drawn token lets be shown; the last piece where it ends the answer. logits: [n_vocab], which
        it was drawn from."""
        if is_end and not self._ignores_end:
            return self._text.end("stop")
        self.completion_tokens += 1
        if self._closing is not None:
            self._closing.push(piece)
        if self._score is None:
            return self._text.push_bytes(piece)
        return self._text.push(self._score(token, self._text.length, logits))

    def end(self, reason: str) -> Piece:
        """The last piece of an answer that ends for another reason."""
        return self._text.end(reason)


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
