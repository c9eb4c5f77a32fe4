"""Rank allocators: one module each; the directory is the registry.

A module `plan/allocate/<name>.py` provides

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

from ...errors import ConvertError
from ...ir import F64, SIDES, Array
from ..budget import split_groups, water_fill

Ranks = Mapping[tuple[int, str], tuple[int, ...]]  # (layer, side) -> rank per group


@dataclass(frozen=True)
class RankProblem:
    layers: Sequence[int]  # that attend
    n_groups: int
    group_width: int  # group · head_dim
    keep: float
    pad: int
    stats: Mapping[str, Sequence[Mapping[str, Array]]]
    sigmas: Callable[[int, str], tuple[F64, ...]]  # importance per group, descending
    full_layers: frozenset[int] = frozenset()  # keep all of K and V, at the expense of the others

    @property
    def capacity(self) -> int:
        """Units of `pad` channels in a full group; the last may be partial."""
        return -(-self.group_width // self.pad)

    @property
    def items(self) -> list[tuple[int, str]]:
        """Layers that get ranks, K and V side by side."""
        layers = [layer for layer in self.layers if layer not in self.full_layers]
        return [(layer, side) for layer in layers for side in SIDES]

    @property
    def channels(self) -> int:
        """KV dimensions of all these layers."""
        return len(self.layers) * len(SIDES) * self.n_groups * self.group_width

    @property
    def total_units(self) -> int:
        """Units for `items`: the kept fraction of everything, less what the full layers keep.

        Raises:
            ConvertError: the kept fraction is below one unit per group.
        """
        rows = len(self.items) * self.n_groups
        exempt = self.channels - rows * self.group_width
        units = min(round((self.keep * self.channels - exempt) / self.pad), rows * self.capacity)
        if units < rows:
            least = (exempt + rows * self.pad) / self.channels
            hint = "or fewer full layers" if self.full_layers else "or a larger --group"
            expected = f"at least {least:.4g} (rank {self.pad} in every group)"
            raise ConvertError("--keep", expected, f"{self.keep:g}", hint)
        return units


class Allocator(Protocol):
    NEEDS: tuple[str, ...]

    def allocate(self, problem: RankProblem) -> Ranks: ...


def names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def module(name: str) -> Allocator:
    found: Any = importlib.import_module(f"{__name__}.{name}")
    return found  # type: ignore[no-any-return]


def by_weight(problem: RankProblem, weights: F64) -> Ranks:
    """Ranks in proportion to one weight per (layer, side), clamped and redistributed, in units of `pad`."""
    items = problem.items
    low = np.full(len(items), problem.n_groups, dtype=np.int64)
    high = low * problem.capacity
    units = water_fill(weights, low, high, problem.total_units)
    return {item: split(problem, item, int(share)) for item, share in zip(items, units, strict=True)}


def by_depth(problem: RankProblem, depth: F64, steepest: float = 0.25) -> Ranks:
    """Ranks d_max · (1 - depth · (1 - d_min / d_max)) for the layers of `items`; K and V of a layer are
    equal but for the last unit of the budget.

    The mean is linear in d_min, so d_min follows from the budget with d_max the full width. Where that makes
    d_min < steepest · d_max, the slope stays there and d_max comes down instead.
    """
    mean = problem.total_units * problem.pad / (len(problem.items) * problem.n_groups * problem.group_width)
    middle = float(depth.mean())
    ratio = 1.0 - (1.0 - min(mean, 1.0)) / middle if middle > 0 else 1.0
    return by_weight(problem, np.repeat(1.0 - depth * (1.0 - max(ratio, steepest)), 2))


def split(problem: RankProblem, item: tuple[int, str], units: int) -> tuple[int, ...]:
    """Ranks of the groups of one layer's K or V: equal shares, the rest by energy."""
    counts = split_groups(units, problem.sigmas(*item), problem.capacity, problem.pad)
    return tuple(min(count * problem.pad, problem.group_width) for count in counts)


def by_tail(
    problem: RankProblem, power: int, weights: Mapping[tuple[int, str], float] | None = None
) -> Ranks:
    """Ragged ranks from one threshold for all groups: a unit stays while what would be lost by cutting
    before it, weight · sum_{i >= first column} sigma_i^power over the group's total, is above the threshold.

    The threshold that meets the budget is found by sorting all units, which settles ties too.
    """
    total = problem.total_units
    counts = {(item, group): 1 for item in problem.items for group in range(problem.n_groups)}
    losses = []
    for item in problem.items:
        weight = 1.0 if weights is None else weights[item]
        for group, sigma in enumerate(problem.sigmas(*item)):
            tail = weight * tails(sigma, power)[problem.pad :: problem.pad]
            losses += [(float(loss), (item, group)) for loss in tail]
    losses.sort(key=lambda loss: -loss[0])
    for _, key in losses[: total - len(counts)]:
        counts[key] += 1
    width, pad = problem.group_width, problem.pad
    return {
        item: tuple(min(counts[item, group] * pad, width) for group in range(problem.n_groups))
        for item in problem.items
    }


def tails(sigma: F64, power: int) -> F64:
    """tail[j] = sum_{i >= j} sigma_i^power over the whole sum: the share that is lost by keeping j
    columns."""
    weights = np.asarray(sigma, dtype=np.float64) ** power
    suffix: F64 = np.cumsum(weights[::-1])[::-1]
    return suffix / max(float(suffix[0]), np.finfo(np.float64).tiny)
