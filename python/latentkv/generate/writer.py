"""Drawn tokens become pieces of an answer: text that can be shown, and at its end why it ended. All that ends
an answer is decided here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from latentkv.chat.thoughts import ThoughtCloser
from latentkv.sampling.closing import JsonClosing
from latentkv.sampling.logprobs import TokenScore
from latentkv.text import StopMatcher, Utf8Stream

Drawn = tuple[int, bytes, bool]  # a token, its bytes, whether it ends an answer
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


@dataclass(frozen=True)
class Ends:
    """What ends an answer beside its limit and the model's end tokens.

    cut: is told text as it comes; how many characters of it stay, where it ends the answer.
    asked: is told a token that was written; whether the answer ends behind it.
    """

    stop: Sequence[str] = ()
    ignores_end: bool = False  # an end token is written like any other
    cut: Callable[[str], int | None] | None = None
    asked: Callable[[int], bool] | None = None


class AnswerWriter:
    """One answer: `tokens` are what was written so far, `end` the token by which the model ended it."""

    def __init__(
        self,
        ends: Ends,
        limit: int,
        hard_limit: int,
        score: Score | None,
        closing: JsonClosing | None,
        shown: Mapping[int, bytes],
        thought: ThoughtCloser | None = None,
    ) -> None:
        """limit: tokens that there is room for now, of hard_limit in all. score: of a token that is shown
        beside its text; None: texts alone. closing: closes the answer near its end. shown: special tokens
        whose text is part of the answer. thought: closes what the model thinks before it."""
        self.limit, self.hard_limit = limit, hard_limit
        self.tokens: list[int] = []
        self.end: int | None = None
        self._ends, self._text = ends, AnswerText(ends.stop)
        self._score, self._closing, self._shown, self._thought = score, closing, shown, thought

    @property
    def left(self) -> int:
        """Tokens that there is room for now, below 0 where the room shrank."""
        return self.limit - len(self.tokens)

    @property
    def closes(self) -> bool:
        """Whether closed() may change logits."""
        return self._closing is not None or (self._thought is not None and self._thought.forces)

    def closed(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """The logits [n_vocab] to draw the next token from: others than these where the answer has to be
        closed."""
        if self._thought is not None and self._thought.forces:
            return self._thought.applied(logits)
        if self._closing is None:
            return logits
        return self._closing.applied(logits, self.hard_limit - len(self.tokens))

    def step(self, drawn: Drawn, logits: NDArray[np.float32] | None) -> Piece:
        """What a drawn token lets be shown; the last piece where the answer ends. logits: [n_vocab], which it
        was drawn from."""
        token, piece, is_end = drawn
        if is_end and not self._ends.ignores_end:
            self.end = token
            return self._text.end("stop")
        self.tokens.append(token)
        if self._thought is not None:
            self._thought.push(token)
        piece = self._shown.get(token, piece)
        if self._closing is not None:
            self._closing.push(piece)
        if self._score is None:
            shown = self._text.push_bytes(piece)
        else:
            shown = self._text.push(self._score(token, self._text.length, logits))
        if shown.finish_reason is not None:
            return shown
        kept = None if self._ends.cut is None else self._ends.cut(shown.text)
        if kept is not None:
            return Piece(shown.text[:kept], shown.tokens, "length")
        if self._ends.asked is not None and self._ends.asked(token):
            return self._last(shown, "stop")
        return self._last(shown, "length") if self.left <= 0 else shown

    def _last(self, shown: Piece, reason: str) -> Piece:
        end = self._text.end(reason)
        return replace(end, text=shown.text + end.text, tokens=shown.tokens + end.tokens)


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
