"""Log-probabilities: of tokens that were written, and of a prompt's, as it is read."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from latentkv.sampling.logprobs import TokenScore, best, log_softmax
from latentkv.text import Utf8Stream

if TYPE_CHECKING:
    from latentkv import _core


def token_score(
    model: _core.Model,
    token: int,
    offset: int,
    logits: NDArray[np.float32] | None,
    count: int | None,
    shown: Container[int] = (),
) -> TokenScore:
    """logits: [n_vocab], before the token. count: rivals; None: no log-probabilities. shown: special tokens
    whose text counts."""
    piece = model.token_to_piece(token, token in shown)
    if count is None or logits is None:
        return TokenScore(token, piece, offset)
    logprobs = log_softmax(logits)
    top = best(logprobs, count)
    rivals = [(model.token_to_piece(other, other in shown), float(logprobs[other])) for other in top]
    return TokenScore(token, piece, offset, float(logprobs[token]), rivals, top)


def drawn_score(
    model: _core.Model,
    sampler: _core.Sampler,
    token: int,
    offset: int,
    count: int,
    shown: Container[int] = (),
) -> TokenScore:
    """The same after all samplers: of the tokens that it was drawn from, which may be fewer than `count`."""
    found = sampler.candidates(count)
    own = dict(found).get(token) or dict(sampler.candidates(model.n_vocab)).get(token, 0.0)
    return TokenScore(
        token,
        model.token_to_piece(token, token in shown),
        offset,
        _log(own),
        [(model.token_to_piece(other, other in shown), _log(p)) for other, p in found],
        [other for other, _ in found],
    )


def _log(p: float) -> float:
    return math.log(p) if p > 0 else -math.inf


class PromptScores:
    """Takes the logits of a prompt's tokens in pieces, in order, and keeps none of them."""

    def __init__(
        self, model: _core.Model, prompt: Sequence[int], count: int, shown: Container[int] = ()
    ) -> None:
        self._model, self._prompt, self._count, self._shown = model, prompt, count, shown
        self._utf8, self._text = Utf8Stream(), ""
        self._scores: list[TokenScore] = []
        self._append(None)

    def add(self, logits: NDArray[np.float32]) -> None:
        """logits: [n, n_vocab] of the next n tokens; those after the prompt's end are left."""
        for row in logits:
            if len(self._scores) < len(self._prompt):
                self._append(row)

    @property
    def text(self) -> str:
        return self._text + self._utf8.flush()

    def before(self, length: int) -> tuple[TokenScore, ...]:
        """All of them, at offsets that count from the end of a text of `length` characters."""
        return tuple(replace(score, offset=score.offset - length) for score in self._scores)

    def _append(self, logits: NDArray[np.float32] | None) -> None:
        token = self._prompt[len(self._scores)]
        score = token_score(self._model, token, len(self._text), logits, self._count, self._shown)
        self._scores.append(score)
        self._text += self._utf8.push(score.piece)
