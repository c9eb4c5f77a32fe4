"""The same share for K and V of every layer."""

from __future__ import annotations

import numpy as np

from . import RankProblem, Ranks, by_weight

NEEDS: tuple[str, ...] = ()


def allocate(problem: RankProblem) -> Ranks:
    return by_weight(problem, np.ones(len(problem.items)))
