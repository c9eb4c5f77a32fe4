"""A ramp over depth: early layers keep most, late ones least (LoRC, eq. 13, with equally conditioned
layers)."""

from __future__ import annotations

import numpy as np

from ..ir import F64
from . import RankProblem, Ranks, by_weight

NEEDS: tuple[str, ...] = ()


def allocate(problem: RankProblem) -> Ranks:
    layers = len(problem.items) // 2
    return along(problem, np.linspace(0.0, 1.0, layers) if layers > 1 else np.zeros(layers))


def along(problem: RankProblem, depth: F64, steepest: float = 0.25) -> Ranks:
    """Ranks d_max · (1 - depth · (1 - d_min / d_max)) for the layers of `items`; K and V of a layer are
    equal but for the last unit of the budget.

    The mean is linear in d_min, so d_min follows from the budget with d_max the full width. Where that makes
    d_min < steepest · d_max, the slope stays there and d_max comes down instead.
    """
    mean = problem.total_units * problem.pad / (len(problem.items) * problem.n_groups * problem.group_width)
    middle = float(depth.mean())
    ratio = 1.0 - (1.0 - min(mean, 1.0)) / middle if middle > 0 else 1.0
    return by_weight(problem, np.repeat(1.0 - depth * (1.0 - max(ratio, steepest)), 2))
