"""What callers may put between logits and a token: processors of logits, and reasons to stop."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

# (tokens so far [n], logits [n_vocab]) -> changed logits [n_vocab]
LogitsProcessor = Callable[[NDArray[np.intc], NDArray[np.float32]], NDArray[np.float32]]
# (tokens so far [n], logits [n_vocab]) -> stop here
StoppingCriteria = Callable[[NDArray[np.intc], NDArray[np.float32]], bool]


class LogitsProcessorList(list[LogitsProcessor]):
    """Processors applied in order."""

    __module__ = "latentkv"

    def __call__(self, input_ids: NDArray[np.intc], scores: NDArray[np.float32]) -> NDArray[np.float32]:
        for processor in self:
            scores = processor(input_ids, scores)
        return scores


class MinTokensLogitsProcessor:
    """No end token before `min_tokens` tokens; counts from the first call on."""

    __module__ = "latentkv"

    def __init__(self, min_tokens: int, token_eos: int) -> None:
        self.min_tokens = min_tokens
        self.token_eos = token_eos
        self.prompt_tokens: int | None = None

    def __call__(self, input_ids: NDArray[np.intc], scores: NDArray[np.float32]) -> NDArray[np.float32]:
        if self.prompt_tokens is None:
            self.prompt_tokens = len(input_ids)
        if len(input_ids) - self.prompt_tokens < self.min_tokens:
            scores[self.token_eos] = -np.inf
        return scores


class StoppingCriteriaList(list[StoppingCriteria]):
    """Stops when one of them says so."""

    __module__ = "latentkv"

    def __call__(self, input_ids: NDArray[np.intc], logits: NDArray[np.float32]) -> bool:
        return any(criterion(input_ids, logits) for criterion in self)
