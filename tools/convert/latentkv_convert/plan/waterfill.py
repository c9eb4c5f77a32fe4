"""The plan of the method `waterfill` (methods/waterfill.py): the grouping of KV heads that loses least or is
as fast as f16 rows, and what the budget buys for it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from latentkv.plan.allocation import Group, Table, least

from ..compute import crew
from ..course import SHARED
from ..errors import ConvertError
from ..frontier import Frontier, Line, Point, Us, is_as_fast
from ..fuse.rotation import finished
from ..ir import Basis, Plan, form
from ..rows import plan_sizes, sizes
from ..work import Work
from . import allotment, coherent, forecast, master, mla
from .allotment import DROP_PENALTY, Allotment, Count, Terms
from .candidates import Candidate, Shape, candidates, cut, tables
from .linalg import weighted
from .times import features

DEPTHS = (4096, 16384, 65536)  # at which files are compared with f16 rows, and the served context past them
BUDGETS = (0.5, 1.0, 2.0)  # for compressed rows, of the frontier, times the conversion's own
QUICK_CHECKED = 2  # windows
_TABLE = ("cost", "distortion")
LIKELY = 4.0  # nats of a unit of distortion: 3.6 for models/demo at 8.5 %, 4.1 for SmolLM2-135M at 14 %
TIE = 0.02  # of predicted divergence: fewer differences than two samples of a text have


@dataclass(frozen=True)
class Offer(Line):
    """What is said of a candidate, with the candidate."""

    candidate: Candidate


@dataclass(frozen=True)
class Waterfill:
    shape: Shape
    groupings: tuple[Mapping[str, int], ...]  # side -> KV heads that share a latent; to choose from
    count: Count
    share_context: int
    is_master: bool
    prefer: str
    times: features.Times
    depths: tuple[int, ...]
    quick: bool = False

    @property
    def needs(self) -> tuple[str, ...]:
        return ("copies",)

    @property
    def n_checked(self) -> int:
        """Windows that the plan is checked on."""
        return QUICK_CHECKED if self.quick else forecast.CHECKED

    def decompose(self, work: Work, layer: int, side: str, group: int) -> tuple[Basis, ...]:
        """Weighted bases, every coordinate divided by the fourth root of its variance."""
        if work.spec.mla is not None and side == "k":
            return (mla.turned(work.spec.mla),)
        cached, where = self.shape.cached(work, layer, side), f"layer {layer} {side}"
        width = group * work.spec.at(layer).head_dim
        blocks = [slice(begin, begin + width) for begin in range(0, len(cached.moment), width)]
        pairs = [(cached.moment[block, block], cached.fisher[block, block]) for block in blocks]
        with crew.alone():  # whoever asks first: the same bits
            return tuple(weighted(moment, fisher, where, work.device) for moment, fisher in pairs)

    def plan(self, work: Work) -> Plan:
        check = forecast.Check(work, self.n_checked)
        terms = self._terms(work, check)
        full_us = self._us(features.mean_full(work.spec))
        offers, chosen = choose(self._offers(work, terms), full_us, self.prefer)
        candidate = self._counted(work, offers[chosen].candidate)
        bought = self._settled(work, terms, candidate, check)
        if not self.is_master:  # a master's plans are those of its tables, for every budget
            bought = self._corrected(work, terms, candidate, bought, check)
        plan = bought.plan(self.shape, work.spec)
        seen = check.measured(plan, bought.predicted(terms))
        found = Frontier(
            self.times.gpu,
            self.depths,
            self.count.full,
            full_us,
            tuple(Line(offer.groups, offer.points) for offer in offers),
            chosen,
            self.count.n_ctx,
            self.prefer,
        )
        plan = replace(plan, forecast=seen, frontier=found)
        if not self.is_master:
            return plan
        return replace(
            plan, master=master.of(work.spec, self.shape, bought, terms, self.share_context, check, seen)
        )

    def _terms(self, work: Work, check: forecast.Check) -> Terms:
        """Prices of exact tokens are measured. Those of trained factors are latents in f16.

        Raises:
            ConvertError: exact tokens of trained factors take the budget.
        """
        widest = sizes.EXACT_FORMATS[0]
        fixed = {name: size for name, size in self.count.exact.items() if name == widest or not work.trains}
        if max(fixed.values()) >= self.count.budget and work.trains:
            wanted = f"more bytes than exact tokens of trained factors take, in {widest}"
            raise ConvertError("--kv-budget", wanted, f"{self.count.budget} bytes", "raise it")
        prices = {name: 0.0 for name in fixed}
        for name in set(fixed) - {widest}:  # in the precision of a master file, for the same plan there
            price = check.price(self.shape.paths, self.shape.regions(name))
            prices[name] = float(np.float32(max(price, 0.0)))
        return Terms(replace(self.count, exact=fixed), prices)

    def _offers(self, work: Work, terms: Terms) -> Iterator[Offer]:
        """One for every candidate that the budget is enough for.

        Raises:
            LatentKVError: it is enough for none.
        """
        budget = terms.count.budget
        room, is_enough, refused = max(terms.count.rooms(budget).values()), False, None
        own = partial(remembered, work, self.shape, terms.count)
        for candidate in candidates(own, self.groupings, work.spec.row_layers, work.device):
            if least(candidate.tables) > room:
                refused = refused or candidate
                continue
            is_enough = True
            yield Offer(candidate.groups, self._points(work, terms, candidate), candidate)
        if refused is not None and not is_enough:
            allotment.best(refused, self.shape, terms, budget)  # says how many bytes there must be

    def _points(self, work: Work, terms: Terms, candidate: Candidate) -> tuple[Point, ...]:
        """What a candidate is worth at BUDGETS; one below the cheapest plan is left out."""
        own = allotment.best(candidate, self.shape, terms, terms.count.budget)
        fewest = least(candidate.tables) + min(terms.count.exact.values())
        points = []
        for share in BUDGETS:
            budget = terms.multiple(share, own.exact)
            if budget >= fewest:
                bought = own if share == 1 else allotment.best(candidate, self.shape, terms, budget)
                points.append(self._point(work, terms, share, bought))
        return tuple(points)

    def _point(self, work: Work, terms: Terms, share: float, bought: Allotment) -> Point:
        plan = bought.plan(self.shape, work.spec)
        if not self.is_master:
            plan = replace(plan, trained=work.trains).cut(work.spec.mla is not None)
        size = plan_sizes.kv_bytes(work.spec, plan, terms.count.n_ctx)["total"]
        if terms.count.pays_factors:
            size += allotment.added(work, plan)
        us = self._us(features.mean(work.spec, plan.layers, self.times.shared_kb))
        return Point(share, size, bought.predicted(terms, DROP_PENALTY), us, bought.exact)

    def _us(self, counted: features.Features | None) -> Us | None:
        """Microseconds a layer at every depth; None where no kernel's are known."""
        found = [self.times.us(counted, depth) for depth in self.depths]
        known = tuple(us for us in found if us is not None)
        return known if len(known) == len(found) else None

    def _counted(self, work: Work, candidate: Candidate) -> Candidate:
        """The candidate with what errors that are alike in many tokens cost."""
        if work.spec.mla is not None or self.shape.one_row:  # rows that are keys and values in one
            return candidate
        found = coherent.pulls(work, self.shape, candidate)
        return coherent.counted(candidate, self.shape, work.spec, found)

    def _settled(self, work: Work, terms: Terms, candidate: Candidate, check: forecast.Check) -> Allotment:
        """What the budget buys for the candidate. Distortions are nats up to a factor, and prices of exact
        tokens are nats: the window that these were found on may ask for another format."""
        bought = allotment.best(candidate, self.shape, replace(terms, scale=LIKELY), terms.count.budget)
        if len(terms.prices) == 1:
            return bought
        measured = check.roughly(bought.plan(self.shape, work.spec)) - terms.prices[bought.exact]
        scale = max(measured, 0.0) / max(bought.distortion(DROP_PENALTY), 1e-30)
        other = allotment.best(candidate, self.shape, replace(terms, scale=scale), terms.count.budget)
        return bought if other.exact == bought.exact else other

    def _corrected(
        self, work: Work, terms: Terms, candidate: Candidate, bought: Allotment, check: forecast.Check
    ) -> Allotment:
        """What the budget buys by the distortions that segments have while the plan runs, as long as that
        loses less on the first windows."""
        from . import measured  # imports torch

        assert work.sample is not None
        spec, run = work.spec, forecast.run(work.sample)
        size = max(1, SHARED * work.sample.tokens.shape[1] // run.shape[1])
        nats = check.roughly(bought.plan(self.shape, spec))
        for at in range(measured.ROUNDS if work.device != "cpu" else 1):
            windows = run[at * size :][:size]
            if not len(windows):
                break
            found = measured.shares(work, bought.plan(self.shape, spec), windows)
            for power in (1.0, 0.5):
                by_run = measured.corrected(candidate, bought, self.shape, spec, found, power)
                other = allotment.best(by_run, self.shape, terms, terms.count.budget)
                seen = check.roughly(other.plan(self.shape, spec))
                if seen < nats:
                    break
            else:
                break
            candidate, bought, nats = by_run, other, seen
        return bought


def choose(lines: Iterable[Offer], full: Us | None, prefer: str) -> tuple[tuple[Offer, ...], int]:
    """The lines that had to be looked at, and which of them it is. `lines` come from the widest groups to the
    narrowest and are made one by one, as each costs minutes on a large model.

    speed: the first one that is as fast as full f16 rows; if none is, the one of least divergence. Where
    times are not known, the widest: as a rule it loses least.
    size: the one of least divergence, of those within TIE of it the fastest. Narrower groups lose more at
    equal bytes unless the factors of wide ones eat the budget: the first one that loses more ends the search.
    """
    seen: list[Offer] = []
    for line in lines:
        seen.append(line)
        us = line.own.us
        if prefer == "speed" and (us is None or full is None):
            if len(seen) == 1:
                return tuple(seen), 0
        elif prefer == "speed" and us is not None and full is not None and is_as_fast(us, full):
            return tuple(seen), len(seen) - 1
        elif prefer == "size" and line.own.predicted > (1 + TIE) * min(each.own.predicted for each in seen):
            break
    predicted = [line.own.predicted for line in seen]
    best = min(predicted)
    if prefer == "speed":
        return tuple(seen), predicted.index(best)
    tied = [index for index, nats in enumerate(predicted) if nats <= (1 + TIE) * best]
    return tuple(seen), min(tied, key=lambda index: sum(seen[index].own.us or (math.inf,)))


def remembered(work: Work, shape: Shape, count: Count, layer: int, side: str, group: int) -> list[Group]:
    """`priced`, unless an interrupted run has done it."""
    name = work.trail.name("priced", replace(shape), count, layer, side, group)
    found = work.trail.found(name)
    if found is None:
        groups = priced(work, shape, count, layer, side, group)
        tables = {f"{at}-{way}": table for at, own in enumerate(groups) for way, table in enumerate(own)}
        arrays = {f"{name}-{of}": getattr(table, of) for name, table in tables.items() for of in _TABLE}
        work.trail.keep(name, {**arrays, "groups": np.array([len(own) for own in groups], dtype=np.int64)})
        return groups
    return [
        tuple(Table(*(np.array(found[f"{at}-{way}-{of}"]) for of in _TABLE)) for way in range(ways))
        for at, ways in enumerate(found["groups"])
    ]


def priced(work: Work, shape: Shape, count: Count, layer: int, side: str, group: int) -> list[Group]:
    """A layer's groups of a side, each cut in segments of every width; none of K that is made of V's rows."""
    if side == "k" and shape.has_one_row(work.spec, layer):
        return []
    group = work.spec.group_at(layer, group)
    spec, cached = work.spec.at(layer).of_side(side), shape.cached(work, layer, side)
    made = form(spec, shape.paths[side], shape.sink > 0 or shape.recent > 0, work.trains)
    group_width, n_groups = group * spec.head_dim, spec.n_kv // group
    channel = work.stored_as.channel_bytes(made, group_width, spec.n_embd)
    share = group_width / spec.kv_width
    replaced = share * work.projection_bytes(layer, side) if made == "a" else 0.0
    if spec.mla is not None:  # factors are as large for every plan
        channel = 0.0
    cuts = []
    for width in shape.widths:
        widths = cut(group_width, width)
        whole = shape.side(side, group, (widths,) * n_groups)
        bases = finished(work, whole, layer, side)
        costs = tables(cached, bases, whole, spec.head_dim, work.device, shape.formats)
        if spec.mla is not None and side == "k":
            costs = [mla.never_dropped(table) for table in costs]
        cuts.append([count.table(each, layer, widths, channel, replaced) for each in costs])
    return list(zip(*cuts, strict=True))
