"""ZACK's removal rate (Zhang et al. 2024, eq. 6): one rate for all heads, layers, K and V: ragged ranks.

With tail(j) = sum_{i >= j} sigma_i, sigma not squared, a group keeps j + 1 columns where tail(j + 1) /
tail(0) <= r < tail(j) / tail(0), rounded up to whole units: it keeps its units that begin at a tail above r.
"""

from __future__ import annotations

from ...ir import F64
from . import RankProblem, Ranks, by_tail, tails

NEEDS: tuple[str, ...] = ()


def allocate(problem: RankProblem) -> Ranks:
    return by_tail(problem, power=1)


def kept(sigma: F64, rate: float) -> int:
    """Equation 6 for one group: columns that stay at removal rate 0 <= rate < 1."""
    return int((tails(sigma, 1) > rate).sum())
