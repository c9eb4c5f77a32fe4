"""A master file's plan for a byte budget, chosen when the file is opened.

The file brings the distortion of every segment in every row format (docs/gguf.md); what each takes is known
here. One allocation over both picks the formats, as at conversion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from latentkv.errors import expected
from latentkv.plan import kv_budget
from latentkv.plan.allocation import Choice, Group, Table, allocate_beside, rooms, total
from latentkv.plan.kv_budget import KvBudget
from latentkv.plan.options import SessionOptions
from latentkv.plan.presets import resolved

if TYPE_CHECKING:
    from latentkv import _core

SIDES = ("k", "v")


@dataclass(frozen=True)
class Allocation:
    """A row format for every segment, in the file's order, and for exact tokens; what the plan is expected to
    cost."""

    k_plan: tuple[str, ...]
    v_plan: tuple[str, ...]
    kv_sink: str
    kv_recent: str
    n_ctx: int  # at which the budget was counted
    kld: float | None  # nats per token; None where `unmeasured`
    unmeasured: str  # how the exact tokens differ from those that the file's plans were measured with, or ""

    def options(self) -> dict[str, Any]:
        """The keywords of Session and Model.forecast."""
        plans = {"k_plan": self.k_plan, "v_plan": self.v_plan}
        return plans | {"kv_sink": self.kv_sink, "kv_recent": self.kv_recent}


def planned(model: _core.Model, options: SessionOptions | Mapping[str, Any]) -> SessionOptions:
    """The options with `kv_budget` replaced by a plan and presets replaced by row formats.

    Raises:
        LatentKVError: the file is not a master file, there is a row format beside the budget, the budget is
            too small, or a cache type is unknown.
    """
    asked = SessionOptions.of(options)
    budget = asked.kv_budget
    if budget is None:
        return resolved(model, asked)
    if asked.kv or asked.kv_k or asked.kv_v:
        raise expected("--kv-budget", "no --kv beside it", f"--kv-budget {budget} and a row format")
    rest = replace(asked, kv_budget=None)
    return replace(rest, **choose(model, budget, **rest).options())


def choose(model: _core.Model, budget: KvBudget | str, **options: Any) -> Allocation:
    """The best plan within a budget (`14%`, `2.5GiB@131072`). The budget pays for sink and recent tokens too;
    under eviction fewer tokens share it, so each gets more. options: Session's.

    Raises:
        LatentKVError: the file is not a master file, or the budget is too small.
    """
    if not isinstance(budget, KvBudget):
        budget = kv_budget.parse(budget)
    master = model.master
    if master is None:
        name = model.metadata.get("general.name", "the file")
        got = f"{name}, which is not a master file"
        raise expected("--kv-budget", "a file to plan anew", got, "convert with --master")
    n_ctx = budget.context(master["context"])
    asked = SessionOptions.of(options).of_one_sequence()
    penalty, prices = master["drop_penalty"], _prices(master, asked)
    caches = {name: model.kv_bytes(n_ctx, **_exact(name, asked)) for name in prices}
    least = next(iter(caches.values()))
    scales = _scale_bytes(master["formats"][0])
    groups = [
        (table,)
        for side in SIDES
        for table in _tables(master[side], _group_slots(model, least, side), scales, _stored(model, side))
    ]
    offer = _Offer.of(master, groups)
    left = _rooms(caches, budget, n_ctx, model.n_ctx_train)
    exact, chosen = _bought(offer, tuple(left.items()), tuple(prices.items()))
    formats = [master["formats"][option] for choice in chosen for option in choice.formats]
    n_k = len(master["k"]["bytes"])
    differs = (
        f"all tokens, asked for {asked.evict}"
        if asked.evicts
        else unmeasured(model.regions, tuple(master["exact"]), least, asked)
    )
    kld = None if differs else prices[exact] + forecast(master, total(groups, chosen, penalty))
    chosen_exact = _exact(exact, asked)
    plans = tuple(formats[:n_k]), tuple(formats[n_k:])
    return Allocation(*plans, chosen_exact.kv_sink, chosen_exact.kv_recent, n_ctx, kld, differs)


@dataclass(frozen=True)
class _Offer:
    """What a master file sells. Two are equal where all their numbers are."""

    digest: bytes
    master: Mapping[str, Any] = field(compare=False, repr=False)
    groups: Sequence[Group] = field(compare=False, repr=False)

    @staticmethod
    def of(master: Mapping[str, Any], groups: Sequence[Group]) -> _Offer:
        digest = sha256(repr([master[name] for name in ("drop_penalty", "predicted", "kld")]).encode())
        for table in (table for group in groups for table in group):
            digest.update(f"{table.cost.shape}".encode() + table.cost.tobytes() + table.distortion.tobytes())
        return _Offer(digest.digest(), master, groups)


@lru_cache(maxsize=8)
def _bought(
    offer: _Offer, rooms: tuple[tuple[str, int], ...], prices: tuple[tuple[str, float], ...]
) -> tuple[str, list[Choice]]:
    """The same plan is asked for by fit() at every context, and again by who opens the file."""
    nats = partial(forecast, offer.master)
    return allocate_beside(offer.groups, dict(rooms), dict(prices), nats, offer.master["drop_penalty"])


def _prices(master: Mapping[str, Any], asked: SessionOptions) -> dict[str, float]:
    """Row formats for exact tokens to choose from -> nats per token that each costs."""
    prices: dict[str, float] = master["exact"]
    if asked.kv_recent and asked.kv_sink:
        return {asked.kv_recent: prices.get(asked.kv_recent, 0.0)}
    return prices


def _exact(name: str, asked: SessionOptions) -> SessionOptions:
    """The options with exact tokens in format `name`, except where the caller named a format."""
    return replace(asked, kv_sink=asked.kv_sink or name, kv_recent=asked.kv_recent or name)


def forecast(master: Mapping[str, Any], predicted: float) -> float:
    """Nats per token of a plan. predicted: its summed distortion, with dropped segments penalised. Between
    plans that were measured at conversion it interpolates logarithms linearly; beyond them it scales."""
    x, y = (np.log(master[name]) for name in ("predicted", "kld"))
    at = np.log(max(predicted, 1e-30))
    inside = np.clip(at, x[0], x[-1])
    return float(np.exp(np.interp(inside, x, y) + at - inside))


def unmeasured(
    file: Mapping[str, Any], formats: tuple[str, ...], cache: Mapping[str, Any], asked: SessionOptions
) -> str:
    """`recent 128, asked for 0` where the file's plans were measured with other exact tokens, or "". formats:
    those that exact tokens were measured in; cache: the forecast of what was asked for.

    With 0 exact tokens in place of 132, a plan of 0.0005 nats was measured at 0.12: no forecast holds there.
    """
    differences = []
    if cache["sink"] != file["sink"]:
        differences.append(f"sink {file['sink']}, asked for {cache['sink']}")
    if cache["recent"] != file["recent"] or abs(cache["recent_ratio"] - file["recent_ratio"]) > 1e-6:
        differences.append(f"recent {_window(file)}, asked for {_window(cache)}")
    has_recent = cache["recent"] or cache["recent_ratio"]
    for name, there, own in (("sink", cache["sink"], asked.kv_sink), ("recent", has_recent, asked.kv_recent)):
        if there and own and own not in formats:
            differences.append(f"{name} tokens in {' or '.join(formats)}, asked for {own}")
    return "; ".join(differences)


def _window(exact: Mapping[str, Any]) -> str:
    """`128`, `10 %`, or `128 or 10 %`: the larger of both."""
    count, share = exact["recent"], exact["recent_ratio"]
    words = (str(count) if count or not share else "", f"{100 * share:.4g} %" if share else "")
    return " or ".join(filter(None, words))


def _group_slots(model: _core.Model, cache: Mapping[str, Any], side: str) -> list[int]:
    """Slots of compressed rows, for every layer and group."""
    pairs = zip(cache["layer_slots"], model.layers, strict=True)
    return [n_slots for n_slots, layer in pairs for _ in range(_planned(layer, side))]


def _planned(layer: Mapping[str, Any], side: str) -> int:
    """How many tables a layer has: one for each group; with MLA two, of RoPE's channels and of the latent."""
    return len(layer[side]["segments"]) * (2 if layer["key_only"] else 1)


def _scale_bytes(fmt: str) -> int:
    """Bytes of scales that come before a group's segments; 0 for formats whose segments have their own."""
    from latentkv import _core

    return _core.row_bytes([[(fmt, 32)]]) - _core.format_bytes(fmt, 32)


def _stored(model: _core.Model, side: str) -> list[bool]:
    """Whether no segment of a group may be dropped, for every layer and group: RoPE's channels of MLA, which
    come first in a row."""
    return [
        bool(layer["key_only"]) and index == 0
        for layer in model.layers
        for index in range(_planned(layer, side))
    ]


def _tables(side: Mapping[str, Any], n_slots: list[int], scales: int, stored: list[bool]) -> list[Table]:
    """A table for every layer and group; its bytes are those of all slots. scales: bytes before a group's
    first segment."""
    if not n_slots:
        return []
    ends = np.cumsum(side["segments"])[:-1]
    cuts = np.split(side["bytes"], ends), np.split(side["distortion"], ends)
    tables = []
    for cost, distortion, n, is_stored in zip(*cuts, n_slots, stored, strict=True):
        whole = cost.copy()
        whole[0, :-1] += scales
        if is_stored:
            whole[:, -1] = whole[:, 0]  # dropping costs as much as the widest format, so it is never chosen
        tables.append(Table(whole * n, distortion))
    return tables


def _rooms(
    caches: Mapping[str, Mapping[str, Any]], budget: KvBudget, n_ctx: int, n_ctx_train: int
) -> dict[str, int]:
    """Row format of exact tokens -> bytes that the budget leaves for compressed rows of one sequence."""
    fixed = {name: _fixed(cache) for name, cache in caches.items()}
    least = min(fixed, key=lambda name: fixed[name])
    room = _room(caches[least], budget) + fixed[least]
    return rooms(fixed, room, n_ctx, n_ctx_train)


def _fixed(cache: Mapping[str, Any]) -> int:
    """Bytes of everything but compressed rows and the states of recurrent layers."""
    rows = sum(of["k"] + of["v"] for of in cache["regions"] if of["name"] in ("middle", "ring"))
    return int(cache["total"] - cache["states"] - cache["snapshots"] - rows)


def _room(cache: Mapping[str, Any], budget: KvBudget) -> int:
    """The bytes that the budget leaves for compressed rows of one of these caches."""
    regions = {region["name"]: region for region in cache["regions"]}
    return budget.row_bytes(
        f16_bytes=cache["f16_total"],
        fixed=_fixed(cache),
        n_exact=sum(regions[name]["slots"] for name in ("sink", "recent") if name in regions),
        states=cache["states"],
    )
