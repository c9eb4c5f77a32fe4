"""One error budget for all blocks: what K or V of a layer may lose is weighed by how much the output of its
decoder block suffers from it, as measured (calibrate/sensitivity.py). Ragged ranks."""

from __future__ import annotations

from . import RankProblem, Ranks, by_tail

NEEDS: tuple[str, ...] = ("sensitivity",)


def allocate(problem: RankProblem) -> Ranks:
    measured = problem.stats["sensitivity"]
    weights = {(layer, side): float(measured[layer][side].mean()) for layer, side in problem.items}
    return by_tail(problem, power=2, weights=weights)
