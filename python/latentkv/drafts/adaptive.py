"""Prompt lookup as a draft model: `Llama(draft_model=AdaptiveLookup())`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from latentkv import _core
from latentkv.drafts import worth
from latentkv.drafts.lookup import Lookup
from latentkv.drafts.own import OwnLayers
from latentkv.drafts.worth import CPU, GPU, MOST, Step

if TYPE_CHECKING:
    from latentkv.drafts.model import Drafter


class AdaptiveLookup:
    """Guesses as many tokens as are worth a step of one sequence, none where guesses do not come true."""

    def __init__(
        self, num_pred_tokens: int = MOST, on_gpu: bool = False, model: Drafter | OwnLayers | None = None
    ) -> None:
        """model: guesses where the text repeats nothing."""
        self.num_pred_tokens = num_pred_tokens  # the most
        self._model = model
        self._exponent = GPU if on_gpu else CPU
        self._lookup: Lookup | None = None

    def __call__(self, input_ids: NDArray[np.intc], /, **kwargs: Any) -> NDArray[np.intc]:
        """Tokens that may follow `input_ids` [n]."""
        lookup = self._lookup
        known = 0 if lookup is None else len(lookup.text)
        if lookup is None or len(input_ids) < known or not self._goes_on(lookup, input_ids):
            lookup = self._lookup = Lookup(input_ids.tolist())
            if self._model is not None:
                self._model.begin(0)
        else:
            for token in input_ids[known:].tolist():
                lookup.push(token)
        step = Step(1, self._exponent)
        return np.asarray(lookup.guesses_or(self._model, 0, step, self.num_pred_tokens), np.intc)

    def _goes_on(self, lookup: Lookup, input_ids: NDArray[np.intc]) -> bool:
        return bool(np.array_equal(input_ids[: len(lookup.text)], lookup.text.tokens))


def with_own_layers(session: Callable[[], _core.Session]) -> AdaptiveLookup:
    """Beside prompt lookup the layers that the session's file has for further tokens. Where layers are
    recurrent, no more is guessed than can be taken back."""
    most = _core.MTP_GUESSES if session().is_recurrent else MOST
    return AdaptiveLookup(most, worth.on_gpu(session()), OwnLayers(session))
