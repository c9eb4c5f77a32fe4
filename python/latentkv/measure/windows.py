"""How a text is cut for perplexity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from latentkv.errors import expected

_LEAST = 4  # tokens


@dataclass(frozen=True)
class Windows:
    """Windows that share no token. Logits `first` … n_ctx - 2 of each are scored against the token after
    them."""

    tokens: NDArray[np.int32]  # [n_windows, n_ctx]
    first: int

    @property
    def n_ctx(self) -> int:
        return int(self.tokens.shape[1])

    @property
    def scored(self) -> int:
        """The number of scored tokens in each window."""
        return self.n_ctx - 1 - self.first


def llama(tokens: Sequence[int], n_ctx: int, bos: int | None) -> Windows:
    """llama-perplexity's: the second half is scored, so that every scored token has at least n_ctx/2 before
    it.

    `bos` replaces the first token of each window when the vocabulary adds one (None: it does not).
    """
    rows = _cut(tokens, n_ctx)
    if bos is not None:
        rows[:, 0] = bos
    return Windows(rows, n_ctx // 2)


def plain(tokens: Sequence[int], n_ctx: int, bos: int | None) -> Windows:
    """Windows in which every token but the first is scored."""
    return Windows(_cut(tokens, n_ctx), 0)


WINDOWS: dict[str, Callable[[Sequence[int], int, int | None], Windows]] = {"llama": llama, "plain": plain}


def _cut(tokens: Sequence[int], n_ctx: int) -> NDArray[np.int32]:
    if n_ctx < _LEAST:
        raise expected("-c", f"windows of at least {_LEAST} tokens", n_ctx)
    count = len(tokens) // n_ctx
    if not count:
        hint = "lower -c" if len(tokens) >= _LEAST else "choose a longer text"
        raise expected("text", f"at least one window of {n_ctx} tokens", f"{len(tokens)} tokens", hint)
    return np.array(tokens[: count * n_ctx], dtype=np.int32).reshape(count, n_ctx)
