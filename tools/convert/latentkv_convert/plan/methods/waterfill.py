"""Rank and bits of every segment from one byte budget, in nats of divergence.

Per layer and side, with M the second moment of the cached rows and F the Fisher moment of their copies in the
cache (calibrate/copies.py): R = F^(1/2), R M R = U Λ Uᵀ, down = R U, up = Uᵀ R⁻¹. These coordinates are
uncorrelated under M and sorted by their share of the weighted error ½ tr(F E[e eᵀ]); F = I would be PCA. They
are cut in segments, scaled by Λ^(-1/4) and rotated inside them, and every segment gets the row format that
one price per byte buys (latentkv/plan/allocation.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ... import frontier
from ...errors import ConvertError
from ...frontier import Frontier, Line, Point
from ...ir import F64, SIDES, Basis, Forecast, Master, ModelSpec, Plan
from ...rows import exact, sizes
from ...schema import RANK_PAD
from ...work import CHECKED, Work
from .. import allotment, forecast, kv_budget, latent_plan, master, segments, weighted_basis
from ..allotment import DROP_PENALTY, Allotment, Terms
from ..candidates import Candidate, Shape, candidates
from ..times import features, gpu_file
from ..waterfill_options import AUTO, PREFER, SEGMENT_WIDTHS, add_arguments
from . import group_size

__all__ = ["SUMMARY", "Waterfill", "add_arguments", "create"]

SUMMARY = "rank and bits of every segment from one byte budget (--kv-budget)"
UNEQUAL_HEADS = True  # layers may have KV heads of their own
SHARE_CONTEXT = 32768  # tokens at which a share of f16 is counted
# Channels of the widest group that is chosen by itself: factors grow with the square of its width (four
# groups of 1024 take a quarter of what one of 4096 does), and a GPU kernel takes at most 1024 stored ones.
GROUP_WIDTH = 1024
DEPTHS = (4096, 16384, 65536)  # at which files are compared with f16 rows, and the served context past them
BUDGETS = (0.5, 1.0, 2.0)  # for compressed rows, of the frontier, times the conversion's own
QUICK_CHECKED = 2  # windows
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
    if options["one_row"] and not spec.block.value_of_key:
        raise ConvertError("--one-row", "a model that makes V of keys in some layer", spec.gguf_arch)
    served, sink, recent = options["served_context"], options["sink"], options["recent"]
    if served is not None and served <= sink + recent:
        raise ConvertError(
            "--served-context", f"more than sink {sink} and recent {recent} together", str(served)
        )
    kept = sink > 0 or recent > 0
    path = latent_plan.k_path({"k_path": None}, spec, PREFER[options["prefer"]])
    rotates = path == "rotated" and spec.block.position == "rope"
    return Waterfill(
        Shape(
            paths={"k": path, "v": "latent"},
            widths=SEGMENT_WIDTHS if options["segment"] is None else (options["segment"],),
            sink=sink,
            recent=recent,
            context=(served or spec.n_ctx) if rotates else None,
            one_row=options["one_row"],
        ),
        groupings=groupings,
        count=kv_budget.count(
            options["kv_budget"],
            spec,
            served or SHARE_CONTEXT,
            sink,
            recent,
            not options["master"],
            exact.formats(spec) if kept else exact.FORMATS[:1],
            options["one_row"],
        ),
        share_context=served or SHARE_CONTEXT,
        is_master=options["master"],
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
class Offer(Line):
    """What is said of a candidate, with the candidate."""

    candidate: Candidate


@dataclass(frozen=True)
class Waterfill:
    shape: Shape
    groupings: tuple[Mapping[str, int], ...]  # side -> KV heads that share a latent; to choose from
    count: kv_budget.Count
    share_context: int
    is_master: bool
    prefer: str
    times: gpu_file.Times
    depths: tuple[int, ...]
    quick: bool = False

    @property
    def needs(self) -> tuple[str, ...]:
        return ("copies",)

    @property
    def n_checked(self) -> int:
        """Windows that the plan is checked on."""
        return QUICK_CHECKED if self.quick else CHECKED

    def decompose(self, work: Work, layer: int, side: str, group: int) -> tuple[Basis, ...]:
        """Weighted bases, every coordinate divided by the fourth root of its variance."""
        cached, where = self.shape.cached(work, layer, side), f"layer {layer} {side}"
        return weighted_basis.bases(cached, group * work.spec.at(layer).head_dim, where, work.device)

    def plan(self, work: Work) -> Plan:
        terms = self._terms(work)
        full_us = self._us(features.mean_full(work.spec))
        offers, chosen = frontier.choose(self._offers(work, terms), full_us, self.prefer)
        allotment = self._settled(work, terms, offers[chosen].candidate)
        plan = allotment.plan(self.shape, work.spec)
        seen = forecast.measured(work, plan, allotment.predicted(terms))
        found = Frontier(
            self.times.gpu,
            self.depths,
            sizes.full_cache_bytes(work.spec, self.count.slots),
            full_us,
            tuple(Line(offer.groups, offer.points) for offer in offers),
            chosen,
            self.count.n_ctx,
            self.prefer,
        )
        tables = self._master(work, terms, allotment, seen) if self.is_master else None
        return replace(plan, forecast=seen, frontier=found, master=tables)

    def _terms(self, work: Work) -> Terms:
        """Prices of exact tokens are measured. Those of trained factors are latents in f16.

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
            price = forecast.price(work, self.shape.paths, self.shape.regions(name))
            prices[name] = float(np.float32(max(price, 0.0)))
        return Terms(replace(self.count, exact=fixed), prices)

    def _offers(self, work: Work, terms: Terms) -> Iterator[Offer]:
        """One for every candidate that the budget is enough for.

        Raises:
            LatentKVError: it is enough for none.
        """
        budget = terms.count.budget
        room, is_enough, refused = max(terms.count.rooms(budget).values()), False, None
        for candidate in candidates(work, self.shape, terms.count, self.groupings):
            if kv_budget.least(candidate.tables) > room:
                refused = refused or candidate
                continue
            is_enough = True
            yield Offer(candidate.groups, self._points(work, terms, candidate), candidate)
        if refused is not None and not is_enough:
            allotment.best(refused, self.shape, terms, budget)  # says how many bytes there must be

    def _points(self, work: Work, terms: Terms, candidate: Candidate) -> tuple[Point, ...]:
        """What a candidate is worth at BUDGETS; one below the cheapest plan is left out."""
        own = allotment.best(candidate, self.shape, terms, terms.count.budget)
        least = kv_budget.least(candidate.tables) + min(terms.count.exact.values())
        points = []
        for share in BUDGETS:
            budget = terms.multiple(share, own.exact)
            if budget >= least:
                bought = own if share == 1 else allotment.best(candidate, self.shape, terms, budget)
                points.append(self._point(work, terms, share, bought))
        return tuple(points)

    def _point(self, work: Work, terms: Terms, share: float, bought: Allotment) -> Point:
        plan = bought.plan(self.shape, work.spec)
        if not self.is_master:
            plan = replace(plan, trained=work.trains).cut()
        size = sizes.cache_bytes(work.spec, plan, terms.count.n_ctx)
        if terms.count.pays_factors:
            size += kv_budget.added(work, plan)
        us = self._us(features.mean(work.spec, plan.layers))
        return Point(share, size, bought.predicted(terms, DROP_PENALTY), us, bought.exact)

    def _us(self, counted: features.Features | None) -> frontier.Us | None:
        """Microseconds a layer at every depth."""
        found = [self.times.us(counted, depth) for depth in self.depths]
        known = tuple(us for us in found if us is not None)
        return known if len(known) == len(found) else None

    def _settled(self, work: Work, terms: Terms, candidate: Candidate) -> Allotment:
        """What the budget buys for the candidate. Distortions are nats up to a factor (3.6 for models/demo,
        8.5 %), and prices of exact tokens are nats, so the first windows may ask for another format."""
        bought = allotment.best(candidate, self.shape, terms, terms.count.budget)
        if len(terms.prices) == 1:
            return bought
        measured = forecast.roughly(work, bought.plan(self.shape, work.spec)) - terms.prices[bought.exact]
        scale = max(measured, 0.0) / max(bought.distortion(DROP_PENALTY), 1e-30)
        other = allotment.best(candidate, self.shape, replace(terms, scale=scale), terms.count.budget)
        return bought if other.exact == bought.exact else other

    def _master(self, work: Work, terms: Terms, own: Allotment, seen: Forecast) -> Master:
        """What the formats were chosen from, and plans around the file's own, measured to forecast others."""
        spec, cut = work.spec, own.cut
        points = {}
        least = kv_budget.least(cut.groups) + min(terms.count.exact.values())
        for multiple in MEASURED:
            bought = allotment.within(cut, terms, max(terms.multiple(multiple, own.exact), least))
            predicted = bought.distortion(DROP_PENALTY)
            its = seen if multiple == 1 else forecast.measured(work, bought.plan(self.shape, spec), predicted)
            points[predicted] = its.kld - terms.prices[bought.exact]
        rows = iter(group[0].distortion for group in cut.groups)
        by_side: dict[str, list[F64]] = {side: [] for side in SIDES}
        for layer in range(spec.n_layer):
            for side in SIDES:
                n_groups = spec.at(layer).n_kv // cut.candidate.group(spec, layer, side)
                if side == "v" or not self.shape.has_one_row(spec, layer):
                    by_side[side] += [next(rows) for _ in range(n_groups)]
        distortions = {
            side: np.concatenate([np.zeros((0, len(segments.FORMATS))), *tables])
            for side, tables in by_side.items()
        }
        formats = segments.FORMATS
        return master.of(formats, self.share_context, DROP_PENALTY, distortions, points, terms.prices)
