"""Rank and bits of every segment from one byte budget, in nats of divergence.

Per layer and side, with M the second moment of the cached rows and F the Fisher moment of their copies in the
cache (calibrate/copies.py): R = F^(1/2), R M R = U Λ Uᵀ, down = R U, up = Uᵀ R⁻¹. These coordinates are
uncorrelated under M and sorted by their share of the weighted error ½ tr(F E[e eᵀ]); F = I would be PCA. They
are cut in segments, scaled by Λ^(-1/4) and rotated inside them, and every segment gets the row format that
one price per byte buys (latentkv/plan/allocation.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from latentkv.console.progress import stage

from ... import floats, frontier
from ...course import CHOOSE
from ...errors import ConvertError
from ...frontier import Frontier, Line, Point
from ...fuse.finish import finished
from ...ir import F64, SIDES, Basis, LayerPlan, Master, ModelSpec, Plan, SidePlan, form
from ...rows import cached_rows, exact, sizes
from ...schema import RANK_PAD
from ...work import CHECKED, Work
from .. import forecast, kv_budget, latent_plan, master, segments
from ..linalg import spectrum
from ..times import features, gpu_file
from ..waterfill_options import AUTO, PREFER, SEGMENT_WIDTHS, add_arguments
from . import group_size

__all__ = ["SUMMARY", "Waterfill", "add_arguments", "create"]

SUMMARY = "rank and bits of every segment from one byte budget (--kv-budget)"
SHARE_CONTEXT = 32768  # tokens at which a share of f16 is counted
# Channels of the widest group that is chosen by itself: factors grow with the square of its width (four
# groups of 1024 take a quarter of what one of 4096 does), and a GPU kernel takes at most 1024 stored ones.
GROUP_WIDTH = 1024
DEPTHS = (4096, 16384, 65536)  # at which files are compared with f16 rows, and the served context past them
BUDGETS = (0.5, 1.0, 2.0)  # for compressed rows, of the frontier, times the conversion's own
QUICK_CHECKED = 2  # windows
FISHER_FLOOR = 1e-6  # of the largest eigenvalue: F^(-1/2) goes into factors stored in f16
# Truncation errors of one token are not independent, as rounding errors are: their predicted cost is too low.
DROP_PENALTY = 3.0
# Compressed bytes at which a master is measured, in its own: from 8 % to 28 % of f16 at the default.
MEASURED = (0.5, 1.0, 2.2)


def create(options: Mapping[str, Any], spec: ModelSpec) -> Waterfill:
    """Raises:
    ConvertError: a group, context or budget that does not fit the model, or no file of times.
    """
    groupings = _groupings(options["group"], options["group_v"], spec)
    for group in groupings[0].values():
        if group * spec.head_dim % RANK_PAD:
            raise ConvertError(
                "--group", f"groups whose width is a multiple of {RANK_PAD}", str(group * spec.head_dim)
            )
    served, sink, recent = options["served_context"], options["sink"], options["recent"]
    if served is not None and served <= sink + recent:
        raise ConvertError(
            "--served-context", f"more than sink {sink} and recent {recent} together", str(served)
        )
    kept = sink > 0 or recent > 0
    path = latent_plan.k_path({"k_path": None}, spec, PREFER[options["prefer"]])
    rotates = path == "rotated" and spec.block.position == "rope"
    return Waterfill(
        paths={"k": path, "v": "latent"},
        groupings=groupings,
        count=kv_budget.count(
            options["kv_budget"],
            spec,
            served or SHARE_CONTEXT,
            sink,
            recent,
            not options["master"],
            exact.formats(spec) if kept else exact.FORMATS[:1],
        ),
        share_context=served or SHARE_CONTEXT,
        keeps_tables=options["master"],
        context=(served or spec.n_ctx) if rotates else None,
        sink=sink,
        recent=recent,
        widths=SEGMENT_WIDTHS if options["segment"] is None else (options["segment"],),
        prefer=options["prefer"],
        times=gpu_file.load(options["gpu_times"]),
        depths=DEPTHS + tuple(n for n in (served or spec.n_ctx,) if n > DEPTHS[-1]),
        quick=options["quick"],
    )


def _groupings(k: int | None, v: int | None, spec: ModelSpec) -> tuple[Mapping[str, int], ...]:
    """KV heads of --group and --group-v. A side that is left open has all legal groups of at most GROUP_WIDTH
    channels, from the widest to the narrowest, or the narrowest legal one where none is; both sides alike."""
    legal = [n for n in range(spec.n_kv, 0, -1) if spec.n_kv % n == 0 and n * spec.head_dim % RANK_PAD == 0]
    open_ = [n for n in legal if n * spec.head_dim <= GROUP_WIDTH] or legal[-1:] or [spec.n_kv]
    fixed = {side: group_size(n, spec.n_kv) for side, n in (("k", k), ("v", v)) if n != AUTO}
    return tuple({"k": n, "v": n} | fixed for n in (open_ if len(fixed) < len(SIDES) else open_[:1]))


@dataclass(frozen=True)
class Waterfill:
    paths: Mapping[str, str]
    groupings: tuple[Mapping[str, int], ...]  # side -> KV heads that share a latent; to choose from
    count: kv_budget.Count
    share_context: int
    keeps_tables: bool  # a master file
    context: int | None  # that a rotated k is fitted for
    sink: int
    recent: int
    widths: tuple[int, ...]
    prefer: str
    times: gpu_file.Times
    depths: tuple[int, ...]
    quick: bool = False
    prices: Mapping[str, float] = field(default_factory=dict)  # of exact tokens by row format, nats a token
    scale: float = 1.0  # of summed distortions, to nats a token

    @property
    def needs(self) -> tuple[str, ...]:
        return ("copies",)

    @property
    def n_checked(self) -> int:
        """Windows that the plan is checked on."""
        return QUICK_CHECKED if self.quick else CHECKED

    @property
    def groups(self) -> Mapping[str, int]:
        return self.groupings[0]

    def decompose(self, work: Work, layer: int, side: str) -> tuple[Basis, ...]:
        """One weighted basis per group, every coordinate divided by the fourth root of its variance."""
        cached = self.cached(work, layer, side)
        width = self.groups[side] * work.spec.head_dim
        blocks = [slice(begin, begin + width) for begin in range(0, work.spec.kv_width, width)]
        where = f"layer {layer} {side}"
        return tuple(
            weighted(cached.moment[block, block], cached.fisher[block, block], where, work.device)
            for block in blocks
        )

    def cached(self, work: Work, layer: int, side: str) -> cached_rows.CachedRows:
        return cached_rows.of(work, layer, side, self.paths[side], self.context)

    def plan(self, work: Work) -> Plan:
        priced = self.priced(work)
        seen: list[Grouped] = []
        full_us = self.us(features.full(work.spec))
        lines, chosen = frontier.choose(priced._lines(work, seen), full_us, self.prefer)
        best = seen[chosen]
        work.rebase(best.method.decompose)
        cut, plan = best.checked(work)
        full_bytes = sizes.full_cache_bytes(work.spec, self.count.slots)
        found = Frontier(
            self.times.gpu, self.depths, full_bytes, full_us, lines, chosen, self.count.n_ctx, self.prefer
        )
        plan = replace(plan, frontier=found)
        return replace(plan, master=best.method.tables_of(work, cut, plan)) if self.keeps_tables else plan

    def priced(self, work: Work) -> Waterfill:
        """With the prices of exact tokens. Those of trained factors are latents in f16.

        Raises:
            ConvertError: exact tokens of trained factors take the budget.
        """
        widest = exact.FORMATS[0]
        fixed = {name: size for name, size in self.count.exact.items() if name == widest or not work.trains}
        if max(fixed.values()) >= self.count.budget and work.trains:
            wanted = f"more bytes than exact tokens of trained factors take, in {widest}"
            raise ConvertError("--kv-budget", wanted, f"{self.count.budget} bytes", "raise it")
        prices = {name: 0.0 for name in fixed}
        for name in set(fixed) - {widest}:  # in the precision of a master file, for the same plan there
            price = forecast.price(work, self.paths, self._regions(name))
            prices[name] = float(np.float32(max(price, 0.0)))
        return replace(self, count=replace(self.count, exact=fixed), prices=prices)

    def _regions(self, fmt: str) -> Plan:
        """Exact tokens in one row format, and no layers yet."""
        regions = Plan((), self.sink, self.recent, fitted_context=self.context)
        return replace(regions, sink_format=fmt, recent_format=fmt)

    def _lines(self, work: Work, seen: list[Grouped]) -> Iterator[Line]:
        """Of every grouping that the budget is enough for, one by one; what they come from is left in
        `seen`."""
        known: dict[tuple[str, int], list[list[kv_budget.Group]]] = {}
        too_large = None
        for groups in self.groupings:
            method = replace(self, groupings=(groups,))
            work.rebase(method.decompose)
            grouped = Grouped(method, work.spec, method.measured(work, known))
            if max(self.count.rooms(self.count.budget).values()) < kv_budget.least(grouped.tables):
                too_large = too_large or grouped
                continue
            seen.append(grouped)
            yield grouped.line(work)
        if not seen and too_large is not None:
            too_large.allocated(self.count.budget)  # says how many bytes there must be

    def us(self, counted: features.Features | None) -> frontier.Us | None:
        """Microseconds a layer at every depth."""
        found = [self.times.us(counted, depth) for depth in self.depths]
        known = tuple(us for us in found if us is not None)
        return known if len(known) == len(found) else None

    def measured(
        self, work: Work, known: dict[tuple[str, int], list[list[kv_budget.Group]]]
    ) -> list[kv_budget.Group]:
        """Tables of all groups, by layer, side and group. known: (side, KV heads of a group) -> layer ->
        tables, those that another grouping had too."""
        sides = [(side, self.groups[side]) for side in SIDES]
        missing = [key for key in sides if key not in known]
        with stage(len(missing) * work.spec.n_layer, CHOOSE, "tensor") as bar:
            for layer in range(work.spec.n_layer):
                for key in missing:
                    known.setdefault(key, []).append(self.tables(work, layer, key[0]))
                    bar.update(1)
        return [group for layer in range(work.spec.n_layer) for key in sides for group in known[key][layer]]

    def allocated(self, groups: Sequence[kv_budget.Group], budget: int) -> tuple[str, list[kv_budget.Choice]]:
        """The row format of exact tokens, and what the bytes that they leave buy."""
        rooms = self.count.rooms(budget)
        return kv_budget.allocate_beside(groups, rooms, self.prices, lambda x: self.scale * x, DROP_PENALTY)

    def planned(self, spec: ModelSpec, cut: Cut, budget: int) -> tuple[Plan, list[kv_budget.Choice]]:
        """The best formats for segments that are cut already, and for exact tokens."""
        name, chosen = self.allocated(cut.groups, budget)
        choices = zip(cut.widths, chosen, strict=True)
        layers = []
        for _ in range(spec.n_layer):
            k, v = (self._chosen(spec, side, choices) for side in SIDES)
            layers.append(LayerPlan(k, v))
        return replace(self._regions(name), layers=tuple(layers)), chosen

    def scaled(self, multiple: float, own: Plan) -> int:
        """The budget with so many times the bytes for compressed rows that it leaves `own`."""
        fixed = self.count.exact[own.recent_format]
        return fixed + int(multiple * (self.count.budget - fixed))

    def predicted(
        self, cut: Cut, plan: Plan, chosen: Sequence[kv_budget.Choice], drop_penalty: float = 1.0
    ) -> float:
        """Nats per token, of exact tokens too."""
        return self.prices[plan.recent_format] + kv_budget.total(cut.groups, chosen, drop_penalty)

    def tables_of(self, work: Work, cut: Cut, own: Plan) -> Master:
        """What the formats were chosen from, and plans around the file's own, measured to forecast others."""
        points = {}
        for multiple in MEASURED:
            least = kv_budget.least(cut.groups) + min(self.count.exact.values())
            plan, chosen = self.planned(work.spec, cut, max(self.scaled(multiple, own), least))
            predicted = kv_budget.total(cut.groups, chosen, DROP_PENALTY)
            seen = own.forecast if multiple == 1 else forecast.measured(work, plan, predicted)
            assert seen is not None
            points[predicted] = seen.kld - self.prices[plan.recent_format]
        rows = iter(group[0].distortion for group in cut.groups)
        by_side: dict[str, list[F64]] = {side: [] for side in SIDES}
        for _ in range(work.spec.n_layer):
            for side in SIDES:
                by_side[side] += [next(rows) for _ in range(work.spec.n_kv // self.groups[side])]
        distortions = {side: np.concatenate(tables) for side, tables in by_side.items()}
        return master.of(segments.FORMATS, self.share_context, DROP_PENALTY, distortions, points, self.prices)

    def tables(self, work: Work, layer: int, side: str) -> list[kv_budget.Group]:
        """Per group, one table for every width that segments may have."""
        cached = self.cached(work, layer, side)
        made = form(work.spec, self.paths[side], self.sink > 0 or self.recent > 0, work.trains)
        group_width = self.groups[side] * work.spec.head_dim
        channel = work.stored_as.channel_bytes(made, group_width, work.spec.n_embd)
        share = group_width / work.spec.kv_width
        replaced = share * work.projection_bytes(layer, side) if made == "a" else 0.0
        cuts = []
        for width in self.widths:
            n_groups = work.spec.n_kv // self.groups[side]
            widths = self._cut(work.spec, side, width)
            whole = self._side(work.spec, side, (widths,) * n_groups)
            bases = finished(work, whole, layer, side)
            tables = segments.tables(cached, bases, whole, work.spec.head_dim, work.device)
            cuts.append([self.count.table(each, layer, widths, channel, replaced) for each in tables])
        return list(zip(*cuts, strict=True))

    def _cut(self, spec: ModelSpec, side: str, width: int) -> tuple[int, ...]:
        return segments.cut(self.groups[side] * spec.head_dim, width)

    def _side(self, spec: ModelSpec, side: str, widths: tuple[tuple[int, ...], ...]) -> SidePlan:
        return SidePlan(self.paths[side], self.groups[side], tuple(map(sum, widths)), widths)

    def _chosen(
        self, spec: ModelSpec, side: str, choices: Iterator[tuple[int, kv_budget.Choice]]
    ) -> SidePlan:
        """The next widths and choices, one per group of this side, as a plan with formats."""
        widths, formats = [], []
        for _ in range(spec.n_kv // self.groups[side]):
            width, choice = next(choices)
            widths.append(self._cut(spec, side, width))
            formats.append(tuple(segments.FORMATS[at] for at in choice.formats))
        return replace(self._side(spec, side, tuple(widths)), formats=tuple(formats))


@dataclass(frozen=True)
class Grouped:
    """One grouping of KV heads and what its segments cost."""

    method: Waterfill
    spec: ModelSpec
    tables: list[kv_budget.Group]

    def allocated(self, budget: int) -> tuple[Cut, Plan, list[kv_budget.Choice]]:
        """The best cuts and formats for a budget."""
        _, free = self.method.allocated(self.tables, budget)
        cut = Cut(
            tuple((group[choice.table],) for group, choice in zip(self.tables, free, strict=True)),
            tuple(self.method.widths[choice.table] for choice in free),
        )
        return cut, *self.method.planned(self.spec, cut, budget)

    def checked(self, work: Work) -> tuple[Cut, Plan]:
        """The best plan with its forecast. Distortions are nats up to a factor (3.6 for models/demo, 8.5 %),
        prices of exact tokens are nats: where the first windows ask for another format, that one's plan."""
        cut, plan, choices = self.allocated(self.method.count.budget)
        if len(self.method.prices) > 1:
            distortion = kv_budget.total(cut.groups, choices, DROP_PENALTY)
            nats = forecast.roughly(work, plan) - self.method.prices[plan.recent_format]
            scaled = replace(self, method=replace(self.method, scale=max(nats, 0.0) / max(distortion, 1e-30)))
            other = scaled.allocated(self.method.count.budget)
            if other[1].recent_format != plan.recent_format:
                cut, plan, choices = other
        predicted = self.method.predicted(cut, plan, choices)
        return cut, replace(plan, forecast=forecast.measured(work, plan, predicted))

    def line(self, work: Work) -> Line:
        """What it is worth at BUDGETS; one below the cheapest plan is left out."""
        _, own, _ = self.allocated(self.method.count.budget)
        budgets = [(each, self.method.scaled(each, own)) for each in BUDGETS]
        least = kv_budget.least(self.tables) + min(self.method.count.exact.values())
        points = tuple(self._point(work, each, budget) for each, budget in budgets if budget >= least)
        return Line(self.method.groups, points)

    def _point(self, work: Work, share: float, budget: int) -> Point:
        cut, plan, chosen = self.allocated(budget)
        method = self.method
        if not method.keeps_tables:
            plan = replace(plan, trained=work.trains).cut()
        size = sizes.cache_bytes(self.spec, plan, method.count.n_ctx)
        if method.count.pays_factors:
            size += kv_budget.added(work, plan)
        us = method.us(features.mean(self.spec, plan.layers))
        predicted = method.predicted(cut, plan, chosen, DROP_PENALTY)
        return Point(share, size, predicted, us, plan.recent_format)


@dataclass(frozen=True)
class Cut:
    """Groups of all layers and sides, each cut in segments one way."""

    groups: tuple[kv_budget.Group, ...]
    widths: tuple[int, ...]  # of a group's segments


def weighted(moment: F64, fisher: F64, where: str, device: str = "cpu") -> Basis:
    """down = R U Λ^(-1/4), up = Λ^(1/4) Uᵀ R⁻¹, with R = F^(1/2) and R M R = U Λ Uᵀ; sigma = Λ^(1/2).
    Where F is 0, as in a layer whose queries see no further than the exact recent tokens, R = 1: what is
    cached is never read there.

    Raises:
        ConvertError: a moment is not finite.
    """
    import torch

    rows, costs = (floats.tensor(each, device) for each in (moment, fisher))
    root, axes = spectrum(costs, where)
    if not root[0] > 0:
        root = torch.ones_like(root)
    root = root.clamp_min(FISHER_FLOOR**0.5 * float(root[0]))
    forward, backward = (axes * root) @ axes.T, (axes / root) @ axes.T
    sigma, directions = spectrum(forward @ rows @ forward, where)
    scale = sigma.clamp_min(1e-6 * float(sigma[0])).sqrt()
    down, up = forward @ directions / scale, scale[:, None] * (directions.T @ backward)
    return Basis(sigma.cpu().numpy(), down.cpu().numpy(), up.cpu().numpy())
