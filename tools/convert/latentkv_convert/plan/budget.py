"""Exact rank budgets: shares proportional to a weight, between bounds, in whole units, adding up to the
total."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import ConvertError
from ..ir import F64

Units = NDArray[np.int64]


def water_fill(weights: F64, low: Units, high: Units, total: int) -> Units:
    """Integers x with low <= x <= high and sum x = total, as close to lambda · weights as that allows.

    Shares that hit a bound are clamped and what they leave is redistributed in proportion to the weights; the
    fractions that remain go to the largest remainders.

    Raises:
        ConvertError: the bounds cannot add up to the total, or no weight is positive.
    """
    if not low.sum() <= total <= high.sum():
        raise ConvertError("budget", f"{low.sum()} to {high.sum()} units", str(total))
    if not np.isfinite(weights).all() or (weights < 0).any() or not weights.any():
        raise ConvertError("budget", "weights that are finite, not negative and not all zero", str(weights))
    weights = np.maximum(weights, 1e-12 * weights.max())
    left, right = 0.0, float(high.max()) / float(weights.min()) + 1.0
    for _ in range(200):
        middle = (left + right) / 2
        if np.clip(middle * weights, low, high).sum() < total:
            left = middle
        else:
            right = middle
    shares = np.clip(right * weights, low, high)
    units = np.floor(shares + 1e-9).astype(np.int64)
    order = np.argsort(-(shares - units), kind="stable")
    while (short := total - int(units.sum())) != 0:
        step = 1 if short > 0 else -1
        room = [i for i in (order if short > 0 else order[::-1]) if low[i] <= units[i] + step <= high[i]]
        units[room[: abs(short)]] += step
    return units


def split_groups(units: int, sigmas: Sequence[F64], capacity: int, pad: int) -> list[int]:
    """Units of one matrix over its groups: equal shares, the rest one each to the groups that gain most
    energy."""
    n = len(sigmas)
    equal, rest = divmod(units, n)
    gain = [float(np.square(sigma[equal * pad : (equal + 1) * pad]).sum()) for sigma in sigmas]
    richest = set(sorted(range(n), key=lambda g: -gain[g])[:rest])
    return [min(equal + (g in richest), capacity) for g in range(n)]
