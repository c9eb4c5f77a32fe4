"""Rank and bits of every segment from one byte budget, in nats of divergence.

Per layer and side, with M the second moment of the cached rows and F the Fisher moment of their copies in the
cache (calibrate/copies.py): R = F^(1/2), R M R = U Λ Uᵀ, down = R U, up = Uᵀ R⁻¹. These coordinates are
uncorrelated under M and sorted by their share of the weighted error ½ tr(F E[e eᵀ]); F = I would be PCA. They
are cut in segments, scaled by Λ^(-1/4) and rotated inside them, and every segment gets the row format that
one price per byte buys (latentkv/allocation.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import cached_rows, forecast, kv_budget, latent_plan, limits, master, progress, segments
from ..errors import ConvertError
from ..fuse.finish import finished
from ..ir import F64, SIDES, Basis, LayerPlan, Master, ModelSpec, Plan, SidePlan, form
from ..linalg import eigenbasis
from ..quantize import FILE_TYPES
from ..schema import RANK_PAD
from ..work import Work
from . import group_size, parse_group

SUMMARY = "rank and bits of every segment from one byte budget (--kv-budget)"
PREFER = {"speed": "rotated", "size": "rebuild"}  # the path of keys with RoPE
SEGMENT_WIDTHS = (32, 64, 128)
SHARE_CONTEXT = 32768  # tokens at which a share of f16 is counted
# Channels of a default group: factors grow with the square of its width (four groups of 1024 take a quarter
# of what one of 4096 does), and a GPU kernel takes at most 1024 stored ones.
GROUP_WIDTH = 1024
WIDEST = 0  # --group: the widest that is not wider
FISHER_FLOOR = 1e-6  # of the largest eigenvalue: F^(-1/2) goes into factors stored in f16
# Truncation errors of one token are not independent, as rounding errors are: their predicted cost is too low.
DROP_PENALTY = 3.0
# Compressed bytes at which a master is measured, in its own: from 8 % to 28 % of f16 at the default.
MEASURED = (0.5, 1.0, 2.2)


def add_arguments(parser: Any) -> None:
    parser.add_argument(
        "--kv-budget",
        type=kv_budget.parse,
        default=kv_budget.parse("14%"),
        metavar="SIZE",
        help="whole cache: a share of the f16 one (default 14%%), or bytes at a context (2.5GiB@131072)",
    )
    parser.add_argument(
        "--master",
        action="store_true",
        help="a file that can be planned anew for any --kv-budget when it is opened",
    )
    parser.add_argument(
        "--prefer",
        choices=tuple(PREFER),
        default="speed",
        help="keys with RoPE: speed (default) reads them as stored, size rebuilds them at every read",
    )
    parser.add_argument(
        "--served-context",
        type=limits.tokens(1, limits.SERVED_CONTEXT),
        default=None,
        metavar="N",
        help="context speed is fitted for (default: the model's) and a share counted at (default 32768)",
    )
    parser.add_argument(
        "--sink",
        type=limits.tokens(0, limits.SINK),
        default=4,
        metavar="N",
        help="first tokens kept exact (default 4)",
    )
    parser.add_argument(
        "--recent",
        type=limits.tokens(0, limits.RECENT),
        default=128,
        metavar="N",
        help="latest tokens kept exact (default 128)",
    )
    parser.add_argument(
        "--group",
        type=parse_group,
        default=WIDEST,
        metavar="N|all",
        help="KV heads that share a K latent (default: as many as have 1024 channels)",
    )
    parser.add_argument(
        "--group-v",
        type=parse_group,
        default=WIDEST,
        metavar="N|all",
        help="KV heads that share a V latent (default: as many as have 1024 channels)",
    )
    parser.add_argument(
        "--weight",
        choices=("fisher", "energy"),
        default="fisher",
        help="what an error costs by its direction (default), or the same in every direction of a tensor",
    )
    parser.add_argument(
        "--balance",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="scale channels by the fourth root of their variance (default)",
    )
    parser.add_argument(
        "--segment",
        type=int,
        choices=(16, *SEGMENT_WIDTHS),
        default=None,
        help="channels with one format, scale and minimum (default: what serves each tensor best)",
    )


def create(options: Mapping[str, Any], spec: ModelSpec) -> Waterfill:
    """Raises:
    ConvertError: a group, context or budget that does not fit the model.
    """
    groups = {side: _group(options[name], spec) for side, name in (("k", "group"), ("v", "group_v"))}
    for group in groups.values():
        if group * spec.head_dim % RANK_PAD:
            raise ConvertError(
                "--group", f"groups whose width is a multiple of {RANK_PAD}", str(group * spec.head_dim)
            )
    served, sink, recent = options["served_context"], options["sink"], options["recent"]
    if served is not None and served <= sink + recent:
        raise ConvertError(
            "--served-context", f"more than sink {sink} and recent {recent} together", str(served)
        )
    path = latent_plan.k_path({"k_path": None}, spec, PREFER[options["prefer"]])
    rotates = path == "rotated" and spec.block.position == "rope"
    return Waterfill(
        paths={"k": path, "v": "latent"},
        groups=groups,
        count=kv_budget.count(
            options["kv_budget"], spec, served or SHARE_CONTEXT, sink, recent, not options["master"]
        ),
        share_context=served or SHARE_CONTEXT,
        keeps_tables=options["master"],
        context=(served or spec.n_ctx) if rotates else None,
        sink=sink,
        recent=recent,
        widths=SEGMENT_WIDTHS if options["segment"] is None else (options["segment"],),
        weight=options["weight"],
        balance=options["balance"],
    )


def _group(value: int | None, spec: ModelSpec) -> int:
    """KV heads of --group; the default is the most that GROUP_WIDTH channels hold, or the fewest that are
    legal."""
    if value != WIDEST:
        return group_size(value, spec.n_kv)
    legal = [n for n in range(1, spec.n_kv + 1) if spec.n_kv % n == 0 and n * spec.head_dim % RANK_PAD == 0]
    return max((n for n in legal if n * spec.head_dim <= GROUP_WIDTH), default=min(legal, default=spec.n_kv))


@dataclass(frozen=True)
class Waterfill:
    paths: Mapping[str, str]
    groups: Mapping[str, int]
    count: kv_budget.Count
    share_context: int
    keeps_tables: bool  # a master file
    context: int | None  # that a rotated k is fitted for
    sink: int
    recent: int
    widths: tuple[int, ...]
    weight: str = "fisher"
    balance: bool = True

    @property
    def needs(self) -> tuple[str, ...]:
        return ("copies",)

    def decompose(self, work: Work, layer: int, side: str) -> tuple[Basis, ...]:
        """One weighted basis per group, every coordinate divided by the fourth root of its variance."""
        cached = self.cached(work, layer, side)
        width = self.groups[side] * work.spec.head_dim
        blocks = [slice(begin, begin + width) for begin in range(0, work.spec.kv_width, width)]
        where = f"layer {layer} {side}"
        return tuple(
            weighted(cached.moment[block, block], cached.fisher[block, block], where, self.balance)
            for block in blocks
        )

    def cached(self, work: Work, layer: int, side: str) -> cached_rows.CachedRows:
        found = cached_rows.of(work, layer, side, self.paths[side], self.context)
        if self.weight == "fisher":
            return found
        width = len(found.fisher)
        return replace(found, fisher=np.eye(width) * (np.trace(found.fisher) / width))

    def plan(self, work: Work) -> Plan:
        spec = work.spec
        sides = [(layer, side) for layer in range(spec.n_layer) for side in SIDES]
        groups: list[kv_budget.Group] = []
        with progress.bar(len(sides), "measure formats", "side") as bar:
            for layer, side in sides:
                groups += self.tables(work, layer, side)
                bar.update(1)
        free = kv_budget.allocate(groups, self.count.budget, DROP_PENALTY)
        cut = Cut(
            tuple((group[choice.table],) for group, choice in zip(groups, free, strict=True)),
            tuple(self.widths[choice.table] for choice in free),
        )
        plan, chosen = self.planned(spec, cut, self.count.budget)
        plan = replace(plan, forecast=forecast.measured(work, plan, kv_budget.total(cut.groups, chosen)))
        return replace(plan, master=self.tables_of(work, cut, plan)) if self.keeps_tables else plan

    def planned(self, spec: ModelSpec, cut: Cut, budget: int) -> tuple[Plan, list[kv_budget.Choice]]:
        """The best formats for segments that are cut already."""
        chosen = kv_budget.allocate(cut.groups, budget, DROP_PENALTY)
        choices = zip(cut.widths, chosen, strict=True)
        layers = []
        for _ in range(spec.n_layer):
            k, v = (self._chosen(spec, side, choices) for side in SIDES)
            layers.append(LayerPlan(k, v))
        return Plan(tuple(layers), self.sink, self.recent, fitted_context=self.context), chosen

    def tables_of(self, work: Work, cut: Cut, own: Plan) -> Master:
        """What the formats were chosen from, and plans around the file's own, measured to forecast others."""
        points = {}
        for multiple in MEASURED:
            budget = max(int(multiple * self.count.budget), kv_budget.least(cut.groups))
            plan, chosen = self.planned(work.spec, cut, budget)
            predicted = kv_budget.total(cut.groups, chosen, DROP_PENALTY)
            seen = own.forecast if multiple == 1 else forecast.measured(work, plan, predicted)
            assert seen is not None
            points[predicted] = seen.kld
        rows = iter(group[0].distortion for group in cut.groups)
        by_side: dict[str, list[F64]] = {side: [] for side in SIDES}
        for _ in range(work.spec.n_layer):
            for side in SIDES:
                by_side[side] += [next(rows) for _ in range(work.spec.n_kv // self.groups[side])]
        distortions = {side: np.concatenate(tables) for side, tables in by_side.items()}
        return master.of(segments.FORMATS, self.share_context, DROP_PENALTY, distortions, points)

    def tables(self, work: Work, layer: int, side: str) -> list[kv_budget.Group]:
        """Per group, one table for every width that segments may have."""
        cached = self.cached(work, layer, side)
        of_factors = (
            form(self.paths[side], self.sink > 0 or self.recent > 0, work.trains),
            self.groups[side] * work.spec.head_dim,
            work.spec.n_embd,
            FILE_TYPES[work.outtype],
        )
        channel, replaced = kv_budget.channel_bytes(*of_factors), kv_budget.replaced_bytes(*of_factors)
        cuts = []
        for width in self.widths:
            n_groups = work.spec.n_kv // self.groups[side]
            widths = self._cut(work.spec, side, width)
            whole = self._side(work.spec, side, (widths,) * n_groups)
            bases = finished(work, whole, layer, side)
            tables = segments.tables(cached, bases, whole, work.spec.head_dim)
            cuts.append([self.count.table(each, widths, channel, replaced) for each in tables])
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
class Cut:
    """Groups of all layers and sides, each cut in segments one way."""

    groups: tuple[kv_budget.Group, ...]
    widths: tuple[int, ...]  # of a group's segments


def weighted(moment: F64, fisher: F64, where: str, balance: bool = True) -> Basis:
    """down = R U Λ^(-1/4), up = Λ^(1/4) Uᵀ R⁻¹, with R = F^(1/2) and R M R = U Λ Uᵀ; sigma = Λ^(1/2).
    Without balance Λ^(1/4) is left out.

    Raises:
        ConvertError: no query read a cached copy, or a moment is not finite.
    """
    root, axes = eigenbasis(fisher, where)
    if not root[0] > 0:
        raise ConvertError(
            where, "cached copies that matter to the prediction", "no gradient", "raise --calib-window"
        )
    root = np.maximum(root, np.sqrt(FISHER_FLOOR) * root[0])
    forward, backward = (axes * root) @ axes.T, (axes / root) @ axes.T
    sigma, directions = eigenbasis(forward @ moment @ forward, where)
    scale = np.sqrt(np.maximum(sigma, 1e-6 * sigma[0])) if balance else np.ones_like(sigma)
    return Basis(sigma, forward @ directions / scale, scale[:, None] * (directions.T @ backward))
