"""Tokens guessed ahead, which one decode call verifies: a right guess saves a call, a wrong one costs its
share of the batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentkv import ranges

# tokens so far [n] -> tokens that may follow
DraftModel = Callable[[NDArray[np.intc]], NDArray[np.intc]]


class LlamaDraftModel(ABC):
    """What guesses. Any callable of the same shape does."""

    __module__ = "latentkv"

    @abstractmethod
    def __call__(self, input_ids: NDArray[np.intc], /, **kwargs: Any) -> NDArray[np.intc]:
        """Tokens that may follow `input_ids` [n]; as many as it likes, none among them."""


class LlamaPromptLookupDecoding(LlamaDraftModel):
    """Guesses that a text repeats itself: what followed the last few tokens the last time.

    Prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding), which looks for the
    first time instead. It pays where answers quote: summaries, edits of code, extraction."""

    __module__ = "latentkv"

    def __init__(self, max_ngram_size: int = 2, num_pred_tokens: int = 10) -> None:
        """Looks for the last `max_ngram_size` tokens, then for fewer, and guesses `num_pred_tokens`."""
        self.max_ngram_size = ranges.POSITIVE.check("max_ngram_size", max_ngram_size)
        self.num_pred_tokens = ranges.POSITIVE.check("num_pred_tokens", num_pred_tokens)

    def __call__(self, input_ids: NDArray[np.intc], /, **kwargs: Any) -> NDArray[np.intc]:
        ids = np.asarray(input_ids, dtype=np.intc)
        for size in range(min(self.max_ngram_size, ids.size - 1), 0, -1):
            earlier = np.lib.stride_tricks.sliding_window_view(ids[:-1], size)
            found = np.flatnonzero((earlier == ids[-size:]).all(axis=1))
            if found.size:
                start = int(found[-1]) + size
                return ids[start : start + self.num_pred_tokens]
        return ids[:0]
