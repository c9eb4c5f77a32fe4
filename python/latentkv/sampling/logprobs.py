"""Log-probabilities of sampled tokens, in the shapes of OpenAI's two completion calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentkv.errors import expected


@dataclass(frozen=True)
class TokenScore:
    """One token of an answer: where its text starts, and how likely it and its rivals were under the raw
    logits, or after all samplers where that was asked for."""

    token: int
    piece: bytes
    offset: int  # characters of the answer before it
    logprob: float | None = None  # None: not asked for, or nothing before the token to predict it
    top: list[tuple[bytes, float]] = field(default_factory=list)  # best first
    top_tokens: Sequence[int] = ()  # their ids


def log_softmax(logits: NDArray[np.float32], axis: int = -1) -> NDArray[np.float64]:
    """log(softmax(logits)) over an axis, float64, same shape. Raises LatentKVError for a row without a finite
    largest."""
    peak = logits.max(axis=axis, keepdims=True)
    if not np.isfinite(peak).all():
        raise expected("logits", "finite numbers", f"a row whose largest is {peak[~np.isfinite(peak)][0]}")
    shifted = np.subtract(logits, peak, dtype=np.float64)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=axis, keepdims=True))
    return result


def best(logprobs: NDArray[np.float64], count: int) -> list[int]:
    """Indices of the `count` largest entries, the largest first."""
    count = min(count, logprobs.size)
    if not count:
        return []
    candidates = np.argpartition(-logprobs, count - 1)[:count]
    return [int(i) for i in candidates[np.argsort(-logprobs[candidates], kind="stable")]]


def show(piece: bytes) -> str:
    """A token's text. Bytes that are only part of a character become U+FFFD."""
    return piece.decode("utf-8", errors="replace")


def completion_shape(tokens: Iterable[TokenScore], text_start: int) -> dict[str, Any]:
    """`choices[].logprobs` of create_completion; `text_start` is added to the offsets (the prompt's
    length)."""
    tokens = list(tokens)
    return {
        "tokens": [show(t.piece) for t in tokens],
        "text_offset": [text_start + t.offset for t in tokens],
        "token_logprobs": [t.logprob for t in tokens],
        "top_logprobs": [
            None
            if t.logprob is None
            else {show(piece): p for piece, p in reversed([*t.top, (t.piece, t.logprob)])}
            for t in tokens
        ],
    }


def chat_shape(tokens: Iterable[TokenScore]) -> dict[str, Any]:
    """`choices[].logprobs` of create_chat_completion."""

    def entry(piece: bytes, logprob: float | None) -> dict[str, Any]:
        return {"token": show(piece), "bytes": list(piece), "logprob": logprob}

    return {
        "content": [
            {**entry(t.piece, t.logprob), "top_logprobs": [entry(piece, p) for piece, p in t.top]}
            for t in tokens
        ],
        "refusal": None,
    }
