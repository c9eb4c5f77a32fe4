"""Rows of few bits, read with the energy that they were stored with.

Levels of least squared error take their own error from a row's energy: a third with one bit. Rounding differs
from token to token, so it averages out in scores and in sums of values. This loss does not: it is the same in
every token. So what comes back is multiplied on its way out of the latent, which costs nothing. Formats with
one scale a row have levels that are read further apart already (native/src/cache/formats/normal.h).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..ir import F64, Basis

# The error D of a normal distribution's best levels, by bits: a share of its variance.
ERRORS = {"1": 0.363, "2": 0.119, "3": 0.0374, "4": 0.0115, "6": 0.00104}
# (1 - D)^(-1/2), rounded. SmolLM2-135M at 14 % of f16 loses 0.0070 nats instead of 0.0084.
GAINS = {"q1": 1.25, "q2": 1.0625}


def regained(basis: Basis, widths: Sequence[int], formats: Sequence[str]) -> Basis:
    """For latents that are stored in these formats, by segment."""
    return replace(basis, up=basis.up * gains(widths, formats)[:, None])


def gains(widths: Sequence[int], formats: Sequence[str]) -> F64:
    """[channels]"""
    return np.repeat([GAINS.get(name, 1.0) for name in formats], widths)


def taken(name: str, regains: bool) -> float:
    """The share of every value that levels in this format take from it, on the mean."""
    kept = 1.0 - ERRORS.get(name.lstrip("qn"), 0.0)
    return 1.0 - (kept**0.5 if regains or name.startswith("n") else kept)
