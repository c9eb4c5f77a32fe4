"""What a byte budget has for compressed rows, and what a channel takes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from latentkv.plan.allocation import Table, Units
from latentkv.plan.kv_budget import KvBudget

from ..ir import ModelSpec
from ..rows import sizes


@dataclass(frozen=True)
class Count:
    """At the budget's context."""

    budget: int  # bytes, for compressed rows and exact tokens
    exact: Mapping[str, int]  # bytes of exact tokens by their row format, the widest first
    n_ctx: int  # whole tiles
    slots: sizes.MiddleSlots  # of compressed rows
    pays_factors: bool  # a channel costs its part of the factors

    def rooms(self, budget: int) -> dict[str, int]:
        """Bytes for compressed rows by the row format of exact tokens, of those that it is enough for."""
        return {name: budget - size for name, size in self.exact.items() if budget > size}

    def table(
        self, costs: Table, layer: int, widths: tuple[int, ...], channel: float, replaced: float
    ) -> Table:
        """`costs`, of one slot, for all of the layer's. widths: of the segments; channel, replaced: bytes of
        a channel in a group's factors, and of the projection they replace. Where factors are smaller than
        that, nothing is counted: weights that shrink are no room for the cache. All options but the last pay:
        what is dropped is in no factor."""
        grown = np.maximum(0.0, channel * np.cumsum((0, *widths)) - replaced)
        weights = np.diff(grown) if self.pays_factors else np.zeros(len(widths))
        once: Units = np.ceil(weights).astype(np.int64)
        cost: Units = costs.cost * self.slots.layers[layer]
        cost[:, :-1] += once[:, None]
        return replace(costs, cost=cost)


def count(
    budget: KvBudget,
    spec: ModelSpec,
    served: int,
    sink: int,
    recent: int,
    pays_factors: bool,
    formats: Sequence[str] = ("f16",),
) -> Count:
    """served: the context at which a share is counted. formats: of exact tokens, the widest first.

    Raises:
        LatentKVError: the exact tokens alone take the budget.
    """
    n_ctx = budget.context(served)
    n_exact = sum(sizes.region_slots(n_ctx, sink, recent))
    slots = sizes.MiddleSlots.of(spec, n_ctx, recent > 0)
    rows = {name: n_exact * sizes.full_row_bytes(spec, name) for name in formats}
    cells, least = (n_exact + slots.cells) * sizes.CELL_BYTES, rows[formats[-1]]
    room = budget.row_bytes(sizes.full_cache_bytes(spec, slots), cells + least, n_exact) + least
    return Count(room, rows, slots.whole, slots, pays_factors)
