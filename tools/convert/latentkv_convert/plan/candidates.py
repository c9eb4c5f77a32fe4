"""The ways to group KV heads that a plan is chosen from, each with what its segments cost in every format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from latentkv.console.progress import stage

from ..calibrate import crew
from ..course import CHOOSE
from ..fuse.finish import finished
from ..ir import SIDES, ModelSpec, Plan, SidePlan, form
from ..rows import cached_rows
from ..work import Work
from . import kv_budget, segments

Tables = list[list[kv_budget.Group]]  # layer -> group of heads -> a table for every width of segments


@dataclass(frozen=True)
class Shape:
    """What all candidates of a conversion have in common."""

    paths: Mapping[str, str]  # side -> path
    widths: tuple[int, ...]  # of segments, to choose from
    sink: int
    recent: int
    context: int | None  # that a rotated k is fitted for
    one_row: bool = False  # keys are made of V's rows where V is what the key projection makes

    def regions(self, fmt: str) -> Plan:
        """A plan of exact tokens in one row format, and no layers yet."""
        plan = Plan((), self.sink, self.recent, fitted_context=self.context)
        return replace(plan, sink_format=fmt, recent_format=fmt)

    def has_one_row(self, spec: ModelSpec, layer: int) -> bool:
        return self.one_row and spec.at(layer).value_of_key

    def cached(self, work: Work, layer: int, side: str) -> cached_rows.CachedRows:
        path = cached_rows.ONE_ROW if self.has_one_row(work.spec, layer) else self.paths[side]
        return cached_rows.of(work, layer, side, path, self.context)

    def side(self, side: str, group: int, widths: tuple[tuple[int, ...], ...]) -> SidePlan:
        """widths: of the segments of every group."""
        return SidePlan(self.paths[side], group, tuple(map(sum, widths)), widths)


@dataclass(frozen=True)
class Candidate:
    """One grouping of KV heads."""

    groups: Mapping[str, int]  # side -> KV heads that share a latent, in most layers
    tables: Sequence[kv_budget.Group]  # by layer, side and group

    def group(self, spec: ModelSpec, layer: int, side: str) -> int:
        """KV heads of this layer that share a latent."""
        return spec.group_at(layer, self.groups[side])


def candidates(
    work: Work, shape: Shape, count: kv_budget.Count, groupings: Sequence[Mapping[str, int]]
) -> Iterator[Candidate]:
    """One by one, as each takes minutes with a large model."""
    known: dict[tuple[str, int], Tables] = {}
    layers = range(work.spec.n_layer)
    for groups in groupings:
        sides = [(side, groups[side]) for side in SIDES]
        known |= _measured(work, shape, count, [key for key in sides if key not in known])
        yield Candidate(groups, [group for layer in layers for key in sides for group in known[key][layer]])


def _measured(
    work: Work, shape: Shape, count: kv_budget.Count, keys: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], Tables]:
    """keys: sides with how many of their heads share a latent."""
    found: dict[tuple[str, int], Tables] = {key: [] for key in keys}

    def step(layer: int) -> Tables:
        return [_tables(work, shape, count, layer, *key) for key in keys]

    with stage(len(keys) * work.spec.n_layer, CHOOSE, "tensor") as bar:
        for tables in crew.each(step, work.spec.n_layer, work.device):
            for key, of_key in zip(keys, tables, strict=True):
                found[key].append(of_key)
            bar.update(len(keys))
    return found


def _tables(
    work: Work, shape: Shape, count: kv_budget.Count, layer: int, side: str, group: int
) -> list[kv_budget.Group]:
    """One layer's groups of a side; none of K that is made of V's rows."""
    if side == "k" and shape.has_one_row(work.spec, layer):
        return []
    group = work.spec.group_at(layer, group)
    spec, cached = work.spec.at(layer), shape.cached(work, layer, side)
    made = form(spec, shape.paths[side], shape.sink > 0 or shape.recent > 0, work.trains)
    group_width, n_groups = group * spec.head_dim, spec.n_kv // group
    channel = work.stored_as.channel_bytes(made, group_width, spec.n_embd)
    share = group_width / spec.kv_width
    replaced = share * work.projection_bytes(layer, side) if made == "a" else 0.0
    cuts = []
    for width in shape.widths:
        widths = segments.cut(group_width, width)
        whole = shape.side(side, group, (widths,) * n_groups)
        bases = finished(work, whole, layer, side)
        costs = segments.tables(cached, bases, whole, spec.head_dim, work.device)
        cuts.append([count.table(each, layer, widths, channel, replaced) for each in costs])
    return list(zip(*cuts, strict=True))
