"""What a byte budget has for compressed rows, and what that buys for one candidate: a way to cut every group
in segments, and a format for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from latentkv.plan.allocation import Choice, Group, Table, Units, allocate_beside, rooms, total
from latentkv.plan.kv_budget import KvBudget

from ..ir import FULL, OF_VALUE, SIDES, LayerPlan, ModelSpec, Plan, SidePlan
from ..rows import plan_sizes, sizes
from ..work import Work
from .candidates import Candidate, Shape, cut

# Truncation errors of one token are not independent, as rounding errors are: their predicted cost is too low.
DROP_PENALTY = 3.0
EXACT = ("sink", "recent")  # regions


@dataclass(frozen=True)
class Count:
    """At the budget's context."""

    budget: int  # bytes, for compressed rows and exact tokens
    exact: Mapping[str, int]  # bytes of exact tokens by their row format, the widest first
    n_ctx: int  # whole tiles
    n_ctx_train: int
    slots: tuple[int, ...]  # of compressed rows, in every layer
    full: int  # bytes of the f16 cache
    pays_factors: bool  # a channel costs its part of the factors

    def rooms(self, budget: int) -> dict[str, int]:
        """Bytes for compressed rows by the row format of exact tokens, of those that it is enough for."""
        return rooms(self.exact, budget, self.n_ctx, self.n_ctx_train)

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
        cost: Units = costs.cost * self.slots[layer]
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
    caches = {name: plan_sizes.of_heads(spec, n_ctx, sink, recent, name, one_row) for name in formats}
    exact = {name: [of for of in cache["regions"] if of["name"] in EXACT] for name, cache in caches.items()}
    rows = {name: sum(of["k"] + of["v"] for of in regions) for name, regions in exact.items()}
    cache, least = caches[formats[-1]], rows[formats[-1]]
    n_exact, full = sum(of["slots"] for of in exact[formats[-1]]), cache["f16_total"]
    room = budget.row_bytes(full, cache["cells"] + least, n_exact, sizes.state_bytes(spec)) + least
    return Count(room, rows, cache["n_cells"], spec.n_ctx, tuple(cache["layer_slots"]), full, pays_factors)


@dataclass(frozen=True)
class Terms:
    """What is paid for, in bytes and in nats per token."""

    count: Count
    prices: Mapping[str, float]  # nats that exact tokens cost, by their row format
    scale: float = 1.0  # of summed distortions, to nats

    def allocated(self, groups: Sequence[Group], budget: int) -> tuple[str, list[Choice]]:
        """The row format of exact tokens, and what the bytes that they leave buy."""
        rooms = self.count.rooms(budget)
        return allocate_beside(groups, rooms, self.prices, lambda x: self.scale * x, DROP_PENALTY)

    def multiple(self, times: float, exact: str) -> int:
        """The budget with so many times the bytes for compressed rows that exact tokens in this format
        leave."""
        fixed = self.count.exact[exact]
        return fixed + int(times * (self.count.budget - fixed))


@dataclass(frozen=True)
class Cut:
    """Groups of all layers and sides, each cut in segments one way."""

    candidate: Candidate
    groups: tuple[Group, ...]
    widths: tuple[int, ...]  # of a group's segments


@dataclass(frozen=True)
class Allotment:
    cut: Cut
    exact: str  # row format of exact tokens
    choices: Sequence[Choice]

    def distortion(self, drop_penalty: float = 1.0) -> float:
        return total(self.cut.groups, self.choices, drop_penalty)

    def predicted(self, terms: Terms, drop_penalty: float = 1.0) -> float:
        """Nats per token, of exact tokens too."""
        return terms.prices[self.exact] + self.distortion(drop_penalty)

    def plan(self, shape: Shape, spec: ModelSpec) -> Plan:
        choices = zip(self.cut.widths, self.choices, strict=True)
        layers = []
        for layer in range(spec.n_layer):
            if not spec.makes_rows(layer):
                layers.append(LayerPlan(FULL, FULL))
                continue
            k, v = (self._side(shape, spec, layer, side, choices) for side in SIDES)
            layers.append(LayerPlan(k, v))
        return replace(shape.regions(self.exact), layers=tuple(layers))

    def _side(
        self, shape: Shape, spec: ModelSpec, layer: int, side: str, choices: Iterator[tuple[int, Choice]]
    ) -> SidePlan:
        """The next widths and choices, one per group of this side, as a plan with formats."""
        if side == "k" and shape.has_one_row(spec, layer):
            return OF_VALUE
        own, widths, formats = spec.at(layer).of_side(side), [], []
        group = self.cut.candidate.group(spec, layer, side)
        for _ in range(own.n_kv // group):
            width, choice = next(choices)
            widths.append(cut(group * own.head_dim, width))
            formats.append(tuple(shape.formats[at] for at in choice.formats))
        return replace(shape.side(side, group, tuple(widths)), formats=tuple(formats))


def best(candidate: Candidate, shape: Shape, terms: Terms, budget: int) -> Allotment:
    """The best cuts and formats for a budget.

    Raises:
        LatentKVError: it is not enough for the cheapest plan.
    """
    _, free = terms.allocated(candidate.tables, budget)
    groups = tuple((group[choice.table],) for group, choice in zip(candidate.tables, free, strict=True))
    return within(Cut(candidate, groups, tuple(shape.widths[choice.table] for choice in free)), terms, budget)


def within(cut: Cut, terms: Terms, budget: int) -> Allotment:
    """The best formats for segments that are cut already, and for exact tokens."""
    return Allotment(cut, *terms.allocated(cut.groups, budget))


def added(work: Work, plan: Plan) -> int:
    """Bytes of factors beyond the projections they replace, without vectors; below 0 where weights shrink.
    Ragged groups are padded to the layer's largest."""
    n_bytes, spec, stored_as = 0.0, work.spec, work.stored_as
    for index, layer in enumerate(plan.layers):
        for side in SIDES:
            chosen = layer.side(side)
            if chosen.path in ("full", "value") or (spec.mla is not None and side == "k"):
                continue
            own = spec.at(index)
            form, width = plan.form(own, chosen), chosen.group * own.head_dim
            row = stored_as.row_bytes(form, width, spec.n_embd)
            back = stored_as.channel_bytes(form, width, spec.n_embd) - row
            if spec.mla is not None:  # what comes back is in the model's own factors
                n_bytes += sum(chosen.ranks) * row
                continue
            n_bytes += sum(chosen.ranks) * row + max(chosen.ranks) * len(chosen.ranks) * back
            n_bytes -= work.projection_bytes(index, side) if form == "a" else 0
    return round(n_bytes)
