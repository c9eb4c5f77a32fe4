"""Palu's rank search: ranks in proportion to the mean RMS gradient of each projection's weights, K and V in
one pool.

Differs from the published code where that is in error: labels are the next token (theirs are the one after),
gradients are f32, clamped excess is redistributed in proportion, and the budget is met exactly.
"""

from __future__ import annotations

import numpy as np

from . import RankProblem, Ranks, by_weight

NEEDS: tuple[str, ...] = ("fisher",)


def allocate(problem: RankProblem) -> Ranks:
    fisher = problem.stats["fisher"]
    return by_weight(problem, np.array([float(fisher[layer][side].mean()) for layer, side in problem.items]))
