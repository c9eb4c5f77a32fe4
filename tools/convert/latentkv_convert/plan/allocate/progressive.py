"""A ramp over depth: early layers keep most, late ones least (LoRC, eq. 13, with equally conditioned
layers)."""

from __future__ import annotations

import numpy as np

from . import RankProblem, Ranks, by_depth

NEEDS: tuple[str, ...] = ()


def allocate(problem: RankProblem) -> Ranks:
    layers = len(problem.items) // 2
    return by_depth(problem, np.linspace(0.0, 1.0, layers) if layers > 1 else np.zeros(layers))
