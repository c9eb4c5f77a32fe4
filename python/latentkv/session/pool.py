"""From the hidden states of a text to the vectors that stand for it, as llama.cpp pools and normalizes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from latentkv.errors import expected
from latentkv.session.pooling import NORMS, POOLINGS

_INT16 = 32760.0  # the largest number of a vector by norm 0


class Pool:
    """Pools one text. `mean` takes the average of the hidden states [n, n_embd] after the last norm, `cls`
    the first, `last` the last, and `none` keeps all."""

    def __init__(self, pooling: str, n_tokens: int) -> None:
        if pooling not in POOLINGS:
            raise expected("pooling", " or ".join(POOLINGS), repr(pooling))
        self.pooling, self.n_tokens = pooling, n_tokens
        self._rows: list[NDArray[np.float32]] = []
        self._sum: NDArray[np.float64] | None = None

    def wanted(self, first: int, count: int) -> list[bool]:
        """Which of the tokens first … first + count - 1 have states that the pooling needs."""
        if self.pooling in ("none", "mean"):
            return [True] * count
        at = 0 if self.pooling == "cls" else self.n_tokens - 1
        return [token == at for token in range(first, first + count)]

    def add(self, states: NDArray[np.float32]) -> None:
        """Adds the next states that wanted() asked for, [n, n_embd]."""
        if self.pooling == "mean":
            part = states.sum(axis=0, dtype=np.float64)
            self._sum = part if self._sum is None else self._sum + part
        elif len(states):
            self._rows.append(states.copy())

    def result(self) -> NDArray[np.float32]:
        """[n_tokens, n_embd] for `none`, else [1, n_embd]."""
        if self._sum is not None:
            return (self._sum / self.n_tokens).astype(np.float32)[np.newaxis]
        return np.concatenate(self._rows)


def normalized(rows: NDArray[np.float32], norm: int) -> NDArray[np.float32]:
    """Each row [n, n_embd] divided by its p-norm, `norm` = p: 2 is the Euclidean norm. With 0 its largest
    magnitude becomes 32760, with -1 it stays as it is. A row of zeros stays too."""
    NORMS.check("embd_normalize", norm)
    if norm == -1:
        return rows
    sizes = np.abs(rows.astype(np.float64))
    largest = sizes.max(axis=1, keepdims=True)
    largest[largest == 0] = 1.0
    if norm == 0:
        return (rows * (_INT16 / largest)).astype(np.float32)
    # a large power of numbers above 1 would overflow
    sums = ((sizes / largest) ** norm).sum(axis=1, keepdims=True) ** (1.0 / norm)
    sums[sums == 0] = 1.0
    return (rows / (largest * sums)).astype(np.float32)


def as_lists(rows: NDArray[np.float32], pooling: str) -> list[float] | list[list[float]]:
    """One vector, or one for each token if nothing was pooled."""
    lists: list[list[float]] = rows.tolist()
    return lists if pooling == "none" else lists[0]
