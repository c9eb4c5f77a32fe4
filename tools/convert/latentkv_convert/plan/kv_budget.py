"""`--kv-budget` of a conversion. Its meaning and its allocation are the runtime's, which plans a master file
when it is opened."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from latentkv.plan import kv_budget
from latentkv.plan.allocation import Choice, Group, Table, Units, allocate_beside, least, total
from latentkv.plan.kv_budget import KvBudget

from ..ir import SIDES, ModelSpec, Plan
from ..rows import sizes
from ..work import Work

__all__ = [
    "Choice",
    "Count",
    "Group",
    "KvBudget",
    "Table",
    "added",
    "allocate_beside",
    "count",
    "least",
    "parse",
    "total",
]


def parse(text: str) -> KvBudget:
    """argparse type: `14%` of the f16 cache, or `2.5GiB@131072`, bytes at a context."""
    try:
        return kv_budget.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).partition(" expected ")[2]) from None


@dataclass(frozen=True)
class Count:
    """What a budget has for compressed rows, and what a channel takes of it, at the budget's context."""

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
    one_row: bool = False,
) -> Count:
    """served: the context at which a share is counted. formats: of exact tokens, the widest first.

    Raises:
        LatentKVError: the exact tokens alone take the budget.
    """
    n_ctx = budget.context(served)
    n_exact = sum(sizes.region_slots(n_ctx, sink, recent))
    slots = sizes.MiddleSlots.of(spec, n_ctx, recent > 0)
    rows = {name: n_exact * sizes.full_row_bytes(spec, name, one_row) for name in formats}
    cells, least = (n_exact + slots.cells) * sizes.CELL_BYTES, rows[formats[-1]]
    room = budget.row_bytes(sizes.full_cache_bytes(spec, slots), cells + least, n_exact) + least
    return Count(room, rows, slots.whole, slots, pays_factors)


def added(work: Work, plan: Plan) -> int:
    """Bytes of factors beyond the projections they replace, without vectors; below 0 where weights shrink.
    Ragged groups are padded to the layer's largest."""
    total, spec, stored_as = 0.0, work.spec, work.stored_as
    for index, layer in enumerate(plan.layers):
        for side in SIDES:
            chosen = layer.side(side)
            if chosen.path in ("full", "value"):
                continue
            own = spec.at(index)
            form, width = plan.form(own, chosen), chosen.group * own.head_dim
            row = stored_as.row_bytes(form, width, spec.n_embd)
            back = stored_as.channel_bytes(form, width, spec.n_embd) - row
            total += sum(chosen.ranks) * row + max(chosen.ranks) * len(chosen.ranks) * back
            total -= work.projection_bytes(index, side) if form == "a" else 0
    return round(total)
