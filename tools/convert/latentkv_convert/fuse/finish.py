"""A side's factors as they go into the file: cut to their ranks and rotated inside their segments."""

from __future__ import annotations

import numpy as np

from ..ir import SIDES, Basis, SidePlan
from ..work import Work
from . import rotation


def finished(
    work: Work, plan: SidePlan, layer: int, side: str, bases: tuple[Basis, ...] | None = None
) -> tuple[Basis, ...]:
    """One Basis per group; without --rotate only cut. The rotation depends on seed, layer, side and group
    alone."""
    result = []
    bases = bases or work.bases(layer, side, plan.group)
    for group, (basis, rank) in enumerate(zip(bases, plan.ranks, strict=True)):
        cut = basis.truncated(rank)
        if work.rotate:
            rng = np.random.default_rng([work.seed, layer, SIDES.index(side), group])
            cut = rotation.fuse(cut, plan.segments[group], rng)
        result.append(cut)
    return tuple(result)
