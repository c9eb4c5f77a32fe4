"""What a decode step of one token does in one layer to attend to the cache, counted.

Rows as the GPU's kernels read them (docs/kernels.md): a thread block takes the query rows of one unit of KV
heads, padded to 8, 16 or 32, and a part of the slots; it decodes every stored channel once for all its rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from ...ir import LayerPlan, ModelSpec, SidePlan
from ...rows.sizes import row_bytes

# Feature -> unit of its coefficient.
UNITS = {
    "full": "us",  # full f16 rows: launching, merging
    "full_once": "us a step",  # what a step has once
    "full_bytes": "us per MB of rows",
    "latent": "us",  # latents: launching, merging
    "latent_once": "us a step",
    "factors": "us per MB of E_q and B_v",
    "block": "us per 1000 query rows x channels of one thread block",  # its queries and its part of the sums
    "stored": "us per MB of rows",
    "q8": "us per million channels decoded",
    "q4": "us per million channels decoded",
    "q2": "us per million channels decoded",
    "q1": "us per million channels decoded",
    "products": "us per billion products of query rows and channels",
    "softmax": "us per million query rows x slots",
    "rebuild": "us",  # keys that are rebuilt: launching
    "expand": "us per billion products that make keys",
}
DECODED = ("q8", "q4", "q2", "q1")  # formats that the kernel takes
# What a channel of a row with one scale is counted as, until such rows are timed: the planes of its code.
PLANES = {
    **{"n8": ("q8",), "n6": ("q4", "q2"), "n5": ("q4", "q1"), "n4": ("q4",)},
    **{"n3": ("q2", "q1"), "n2": ("q2",), "n1": ("q1",)},
}
UNIT_CHANNELS = 32  # channels of one format that it takes at once
MOST_CHANNELS = 1024  # of a group
MOST_ROWS = 32  # query rows of a thread block
LEAST_ROWS = 8
LEAST_TILE = 32  # slots that it stages at once, at least
SHARED_KB = 227  # shared memory of a thread block on an H100; consumer cards have 99
FIXED_BYTES = 5120 + 1536  # of it: the kernel's variables, units of three regions


class Heads(Protocol):
    """A model's sizes that count here; ModelSpec has them."""

    @property
    def n_layer(self) -> int: ...
    @property
    def n_head(self) -> int: ...
    @property
    def n_kv(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


@dataclass(frozen=True)
class Features:
    """Counts in the units of their coefficients: those of a step, and those of a slot, which grow with
    depth. windows: of a slot, too, by the depth up to which they grow."""

    step: Mapping[str, float]
    slot: Mapping[str, float]
    windows: Mapping[int, Mapping[str, float]] = field(default_factory=dict)

    def at(self, depth: int) -> dict[str, float]:
        found = dict(self.step)
        for n_slots, counts in ((depth, self.slot), *((min(depth, n), of) for n, of in self.windows.items())):
            for name, count in counts.items():
                found[name] = found.get(name, 0.0) + n_slots * count
        return found


@dataclass(frozen=True)
class Times:
    """What the features cost on one GPU."""

    gpu: str
    coefficients: Mapping[str, float]
    shared_kb: int = SHARED_KB

    def us(self, counted: Features | None, depth: int) -> float | None:
        """What attention at this depth adds to a step; None where a coefficient was not measured."""
        if counted is None:
            return None
        counts = {name: count for name, count in counted.at(depth).items() if count}
        if not counts.keys() <= self.coefficients.keys():
            return None
        return sum(self.coefficients[name] * count for name, count in counts.items())


def of(heads: Heads, layer: LayerPlan, shared_kb: int = SHARED_KB) -> Features | None:
    """Counts of a layer as the file has it: ranks are the columns of its factors. None: the fast kernels do
    not take such rows."""
    k, v = layer.k, layer.v
    if getattr(heads, "mla", None) is not None:
        return None
    if k.path == "full" and v.path == "full":
        return full(heads)
    rebuilds = k.path == "rebuild"
    unit = v.group if rebuilds else math.gcd(k.group, v.group)
    if not (_is_taken(k) and _is_taken(v)) or (rebuilds and unit * heads.head_dim > MOST_CHANNELS):
        return None
    n_rows = unit * heads.n_head // heads.n_kv
    padded = padded_rows(n_rows)
    n_units = heads.n_kv // unit
    at = [(unit * index // k.group, unit * index // v.group) for index in range(n_units)]
    stored = {side: [_channels(names) for names in _runs(plan)] for side, plan in (("k", k), ("v", v))}
    keys = [unit * heads.head_dim if rebuilds else sum(stored["k"][i].values()) for i, _ in at]
    channels = [n + sum(stored["v"][j].values()) for n, (_, j) in zip(keys, at, strict=True)]
    staged = sum(max(_group_bytes(side)) for side in ((v,) if rebuilds else (k, v)))
    rows = block_rows(padded, max(keys), staged, shared_kb)
    blocks = -(-n_rows // rows)
    decoded = dict.fromkeys(DECODED, 0)
    for i, j in at:
        for read in ([] if rebuilds else [stored["k"][i]]) + [stored["v"][j]]:
            for name, n in read.items():
                for plane in PLANES.get(name, (name,)):
                    decoded[plane] += blocks * n
    step = {
        "latent": 1.0,
        "latent_once": 1.0 / heads.n_layer,
        "factors": 2 * heads.n_kv * heads.head_dim * (max(k.ranks) + max(v.ranks)) / 1e6,  # f16
        "block": rows * max(channels) / 1e3,
    }
    slot = {
        "stored": (_bytes(k) + _bytes(v)) / 1e6,
        **{name: n / 1e6 for name, n in decoded.items() if n},
        "products": padded * sum(channels) / 1e9,
        "softmax": padded * n_units / 1e6,
    }
    if rebuilds:
        step["rebuild"] = 1.0
        slot["expand"] = sum(k.kept) * k.group * heads.head_dim / 1e9
    return Features(step, slot)


def full(heads: Heads) -> Features:
    """Counts of full f16 rows of K and V."""
    return Features(
        {"full": 1.0, "full_once": 1.0 / heads.n_layer},
        {"full_bytes": 2 * 2 * heads.n_kv * heads.head_dim / 1e6},
    )


def _heads(spec: ModelSpec, layer: int) -> ModelSpec:
    """A layer's; what a step has once is shared by the layers that attend."""
    return replace(spec.at(layer), n_layer=len(spec.attention_layers))


def mean_full(spec: ModelSpec) -> Features:
    """Counts of full f16 rows in the average layer."""
    return _average(spec, [full(_heads(spec, layer)) for layer in spec.attention_layers])


def mean(spec: ModelSpec, layers: Sequence[LayerPlan], shared_kb: int = SHARED_KB) -> Features | None:
    """Counts of the average layer that attends; None where one is not known."""
    found = [of(_heads(spec, layer), layers[layer], shared_kb) for layer in spec.attention_layers]
    known = [each for each in found if each is not None]
    return _average(spec, known) if len(known) == len(found) else None


def _average(spec: ModelSpec, found: Sequence[Features]) -> Features:
    """The mean of layers that attend. Slots of one with a sliding window are no more than the window."""
    step: dict[str, float] = {}
    slots: dict[int, dict[str, float]] = {0: {}}
    for layer, each in zip(spec.attention_layers, found, strict=True):
        slot = slots.setdefault(spec.window(layer), {})
        for total, counts in ((step, each.step), (slot, each.slot)):
            for name, count in counts.items():
                total[name] = total.get(name, 0.0) + count / len(found)
    return Features(step, slots.pop(0), slots)


def block_rows(padded: int, k_channels: int, row_bytes: int, shared_kb: int) -> int:
    """Query rows of a thread block: as many as leave room for a tile (MlaLayout in kernels/mla/layout.h).
    row_bytes: of a group's K and V."""
    room = 1024 * shared_kb - FIXED_BYTES - LEAST_TILE * row_bytes
    rows = min(padded, MOST_ROWS)
    # queries in f16, scores of 260 slots in f32, weights of two tiles in f16
    while rows > LEAST_ROWS and rows * (2 * k_channels + 4 * 260 + 4 * LEAST_TILE) > room:
        rows //= 2
    return rows


def padded_rows(n: int) -> int:
    """Query rows of all thread blocks that take n."""
    return 8 if n <= 8 else 16 if n <= 16 else -(-n // MOST_ROWS) * MOST_ROWS


def _runs(side: SidePlan) -> list[list[tuple[str, int]]]:
    """(format, channels) of every stored segment, per group."""
    assert side.formats is not None
    return [
        [(name, n) for name, n in zip(names, widths, strict=True) if name != "none"]
        for names, widths in zip(side.formats, side.segments, strict=True)
    ]


def _is_taken(side: SidePlan) -> bool:
    if side.path == "full" or side.formats is None or max(side.kept) > MOST_CHANNELS:
        return False
    return all(
        name in PLANES or (name in DECODED and n % UNIT_CHANNELS == 0)
        for segments in _runs(side)
        for name, n in segments
    )


def _channels(runs: list[tuple[str, int]]) -> dict[str, int]:
    """Format -> channels of one group."""
    found: dict[str, int] = {}
    for name, n in runs:
        found[name] = found.get(name, 0) + n
    return found


def _group_bytes(side: SidePlan) -> list[int]:
    """Bytes of each group's part of a row."""
    return [row_bytes((tuple(segments),)) for segments in _runs(side)]


def _bytes(side: SidePlan) -> int:
    """Bytes of a row."""
    return row_bytes(tuple(map(tuple, _runs(side))))
