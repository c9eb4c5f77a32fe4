"""One threshold on the share of squared energy that a group loses, for all groups of K and V: ragged
ranks."""

from __future__ import annotations

from . import RankProblem, Ranks, by_tail

NEEDS: tuple[str, ...] = ()


def allocate(problem: RankProblem) -> Ranks:
    return by_tail(problem, power=2)
