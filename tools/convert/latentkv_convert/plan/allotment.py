"""What a budget buys for one candidate: a way to cut every group in segments, and a format for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..ir import OF_VALUE, SIDES, LayerPlan, ModelSpec, Plan, SidePlan
from . import kv_budget, segments
from .candidates import Candidate, Shape

# Truncation errors of one token are not independent, as rounding errors are: their predicted cost is too low.
DROP_PENALTY = 3.0


@dataclass(frozen=True)
class Terms:
    """What is paid for, in bytes and in nats per token."""

    count: kv_budget.Count
    prices: Mapping[str, float]  # nats that exact tokens cost, by their row format
    scale: float = 1.0  # of summed distortions, to nats

    def allocated(self, groups: Sequence[kv_budget.Group], budget: int) -> tuple[str, list[kv_budget.Choice]]:
        """The row format of exact tokens, and what the bytes that they leave buy."""
        rooms = self.count.rooms(budget)
        return kv_budget.allocate_beside(groups, rooms, self.prices, lambda x: self.scale * x, DROP_PENALTY)

    def multiple(self, times: float, exact: str) -> int:
        """The budget with so many times the bytes for compressed rows that exact tokens in this format
        leave."""
        fixed = self.count.exact[exact]
        return fixed + int(times * (self.count.budget - fixed))


@dataclass(frozen=True)
class Cut:
    """Groups of all layers and sides, each cut in segments one way."""

    candidate: Candidate
    groups: tuple[kv_budget.Group, ...]
    widths: tuple[int, ...]  # of a group's segments


@dataclass(frozen=True)
class Allotment:
    cut: Cut
    exact: str  # row format of exact tokens
    choices: Sequence[kv_budget.Choice]

    def distortion(self, drop_penalty: float = 1.0) -> float:
        return kv_budget.total(self.cut.groups, self.choices, drop_penalty)

    def predicted(self, terms: Terms, drop_penalty: float = 1.0) -> float:
        """Nats per token, of exact tokens too."""
        return terms.prices[self.exact] + self.distortion(drop_penalty)

    def plan(self, shape: Shape, spec: ModelSpec) -> Plan:
        choices = zip(self.cut.widths, self.choices, strict=True)
        layers = []
        for layer in range(spec.n_layer):
            k, v = (self._side(shape, spec, layer, side, choices) for side in SIDES)
            layers.append(LayerPlan(k, v))
        return replace(shape.regions(self.exact), layers=tuple(layers))

    def _side(
        self,
        shape: Shape,
        spec: ModelSpec,
        layer: int,
        side: str,
        choices: Iterator[tuple[int, kv_budget.Choice]],
    ) -> SidePlan:
        """The next widths and choices, one per group of this side, as a plan with formats."""
        if side == "k" and shape.has_one_row(spec, layer):
            return OF_VALUE
        group, own, widths, formats = self.cut.candidate.group(spec, layer, side), spec.at(layer), [], []
        for _ in range(own.n_kv // group):
            width, choice = next(choices)
            widths.append(segments.cut(group * own.head_dim, width))
            formats.append(tuple(segments.FORMATS[at] for at in choice.formats))
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
