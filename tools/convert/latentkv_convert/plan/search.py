"""Ranks from measured errors: every layer walks down its own states (ranks of K and V), full rank first,
while the error of its block stays within one budget for all layers (Eigen Attention, section 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import ConvertError
from ..ir import SIDES
from .allocate import RankProblem, Ranks, split

States = Sequence[Sequence[Mapping[str, int]]]  # layer that attends -> state -> rank of every head, by side
Errors = Sequence[Sequence[float]]  # layer that attends -> state -> relative error of the block's output


def within(layers: Sequence[int], states: States, errors: Errors, budget: float, n_kv: int) -> Ranks:
    """The last state of every layer before the first that reaches the budget."""
    ranks: dict[tuple[int, str], tuple[int, ...]] = {}
    for layer, chain, measured in zip(layers, states, errors, strict=True):
        failing = next((i for i, error in enumerate(measured) if i > 0 and error >= budget), len(chain))
        ranks |= {(layer, side): (chain[failing - 1][side],) * n_kv for side in SIDES}
    return ranks


def to_budget(problem: RankProblem, states: States, errors: Errors) -> Ranks:
    """The error budget that leaves exactly the kept fraction, in units of the padding.

    Steps are taken in the order of the error budget that allows them (a step allows none before it); the
    last one is taken in part, its units spread over the heads by energy.

    Raises:
        ConvertError: the states end above the kept fraction.
    """
    steps = sorted(
        (max(errors[at][: state + 1]), at, state)
        for at, chain in enumerate(states)
        for state in range(1, len(chain))
    )
    units = {
        (layer, side): -(-chain[0][side] // problem.pad) * problem.n_groups
        for layer, chain in zip(problem.layers, states, strict=True)
        for side in SIDES
    }
    surplus = sum(units.values()) - problem.total_units
    for _, at, state in steps:
        layer = problem.layers[at]
        for side in sorted(SIDES, key=lambda name: states[at][state][name]):
            goal = -(-states[at][state][side] // problem.pad) * problem.n_groups
            taken = min(units[layer, side] - goal, surplus)
            units[layer, side] -= taken
            surplus -= taken
    if surplus:
        reached = (problem.total_units + surplus) * problem.pad / problem.channels
        hint = "lower thresholds need --published-counting off"
        raise ConvertError("--keep", f"at least {reached:.4g}", f"{problem.keep:g}", hint)
    return {item: split(problem, item, count) for item, count in units.items()}
