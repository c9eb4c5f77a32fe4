"""Rank allocators: one module each; the directory is the registry.

A module `allocate/<name>.py` provides

    NEEDS: tuple[str, ...]                              statistics, modules of calibrate/
    def allocate(problem: RankProblem) -> Ranks         ranks that meet the budget exactly
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .. import budget
from ..errors import ConvertError
from ..ir import F64, SIDES, Array

Ranks = Mapping[tuple[int, str], tuple[int, ...]]  # (layer, side) -> rank per group


@dataclass(frozen=True)
class RankProblem:
    n_layer: int
    n_groups: int
    group_width: int  # group · head_dim
    keep: float
    pad: int
    stats: Mapping[str, Sequence[Mapping[str, Array]]]
    sigmas: Callable[[int, str], tuple[F64, ...]]  # importance per group, descending

    @property
    def capacity(self) -> int:
        """Units of `pad` channels in a full group; the last may be partial."""
        return -(-self.group_width // self.pad)

    @property
    def items(self) -> list[tuple[int, str]]:
        return [(layer, side) for layer in range(self.n_layer) for side in SIDES]

    @property
    def total_units(self) -> int:
        channels = len(self.items) * self.n_groups * self.group_width
        return min(round(self.keep * channels / self.pad), len(self.items) * self.n_groups * self.capacity)


class Allocator(Protocol):
    NEEDS: tuple[str, ...]

    def allocate(self, problem: RankProblem) -> Ranks: ...


def names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def module(name: str) -> Allocator:
    found: Any = importlib.import_module(f"{__name__}.{name}")
    return found  # type: ignore[no-any-return]


def by_weight(problem: RankProblem, weights: F64) -> Ranks:
    """Ranks in proportion to one weight per (layer, side), clamped and redistributed, in units of `pad`.

    Raises:
        ConvertError: the kept fraction is below one unit per group.
    """
    items = problem.items
    low = np.full(len(items), problem.n_groups, dtype=np.int64)
    high = low * problem.capacity
    least = int(low.sum()) * problem.pad / (len(items) * problem.n_groups * problem.group_width)
    if problem.total_units < low.sum():
        raise ConvertError(
            "--keep",
            f"at least {least:.4g} (rank {problem.pad} in every group)",
            f"{problem.keep:g}",
            "or a larger --group",
        )
    units = budget.water_fill(weights, low, high, problem.total_units)
    ranks: dict[tuple[int, str], tuple[int, ...]] = {}
    for item, share in zip(items, units, strict=True):
        split = budget.split_groups(int(share), problem.sigmas(*item), problem.capacity, problem.pad)
        ranks[item] = tuple(min(count * problem.pad, problem.group_width) for count in split)
    return ranks
