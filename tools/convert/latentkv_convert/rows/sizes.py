"""True bytes of a cached token, as the native row formats store it (native/src/cache/formats)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..ir import FULL, OF_VALUE, SIDES, LayerPlan, ModelSpec, Plan, SidePlan

FORMATS = ("f16", "q8", "q4", "q3", "q2")
SLOT_TILE = 64  # slots of compressed rows come in whole tiles of this many
EXACT_STEP = 16  # those of exact tokens in multiples of this
DEMOTION_BATCH = 32  # recent tokens are compressed in batches of this many
CELL_BYTES = 12  # a slot's position and sequences, once for all layers
UBATCH = 512  # tokens that pass through the graph together
EXACT_UBATCH = 128  # the largest ubatch of a cache with an exact window


def in_blocks(fmt: str) -> bool:
    """Whether tokens are stored in blocks of 32 with a scale and a minimum per channel: K of old tokens."""
    return fmt[0] == "c"


def segment_bytes(fmt: str, width: int) -> int:
    """fN: N bits per channel. qN: scale and minimum in f16, then N bits per channel in 16s. gN: one f16
    scale, rounded up. cN: N bits per channel, and its share of the two f16 numbers that a channel has for 32
    tokens. qN_0: one f16 scale and N bits per channel in 32s."""
    if fmt == "none":
        return 0
    if fmt[0] == "f":
        return int(fmt[1:]) // 8 * width
    if fmt.endswith("_0"):
        return _up4((2 + 4 * int(fmt[1:-2])) * -(-width // 32))
    bits = int(fmt[1:])
    if in_blocks(fmt):
        return _up4(2 * (bits + 1) * -(-width // 16))
    return _up4((4 if fmt[0] == "q" else 2) + 2 * bits * -(-width // 16))


def side_row_bytes(spec: ModelSpec, plan: SidePlan, fmt: str | None, whole: bool = False) -> int:
    """One token of K or V of one layer; every group's segments one after another, the row rounded up to 4.

    spec: as the layer sees it. fmt None: the plan's own formats, f16 where it has none. What the plan drops
    takes nothing, unless `whole`.
    """
    if spec.shares_kv or plan == OF_VALUE:
        return 0
    segments: Sequence[Sequence[int]] = plan.segments or ((spec.head_dim,),) * spec.n_kv
    planned = plan.formats or tuple(("f16",) * len(widths) for widths in segments)
    stored = 0
    for names, widths in zip(planned, segments, strict=True):
        for name, width in zip(names, widths, strict=True):
            dropped = name == "none" and not whole
            stored += segment_bytes(name if fmt is None or dropped else fmt, width)
    return _up4(stored)


@dataclass(frozen=True)
class MiddleSlots:
    """Slots of compressed rows, of one sequence."""

    layers: tuple[int, ...]  # of every layer
    whole: int  # of the context, in layers that see all of it
    ring: int  # in those that see a window, 0: there are none

    @staticmethod
    def of(spec: ModelSpec, n_ctx: int, recent: bool, blocks: bool = False) -> MiddleSlots:
        """As the runtime allocates them on the CPU. recent: there are recent tokens, which shorten ubatches.
        blocks: K lies in blocks of tokens somewhere, and all layers hold the context."""
        whole = round_up(n_ctx, SLOT_TILE)
        ubatch = min(EXACT_UBATCH if recent else UBATCH, n_ctx)
        ring = 0
        held = []
        for layer in range(spec.n_layer):
            window = spec.window(layer)
            slots = round_up(window + ubatch, SLOT_TILE)
            held.append(not blocks and window > 0 and slots < whole)
            ring = max(ring, slots if held[-1] else 0)
        return MiddleSlots(tuple(ring if in_ring else whole for in_ring in held), whole, ring)

    @staticmethod
    def of_plan(spec: ModelSpec, plan: Plan, n_ctx: int) -> MiddleSlots:
        formats = (name for layer in plan.layers for group in layer.k.formats or () for name in group)
        recent = plan.recent > 0 or plan.recent_ratio > 0
        return MiddleSlots.of(spec, n_ctx, recent, any(in_blocks(name) for name in formats))

    @property
    def cells(self) -> int:
        """Slots with a position and sequences of their own."""
        return self.whole + self.ring

    def full_rows(self, spec: ModelSpec) -> int:
        """Bytes of full K and V in f16."""
        shapes = [spec.at(layer) for layer in range(spec.n_layer)]
        held = zip(shapes, self.layers, strict=True)
        return sum(2 * 2 * own.kv_width * n for own, n in held if not own.shares_kv)


def _layer_rows(spec: ModelSpec, plan: Plan, fmt: str | None) -> list[int]:
    """K and V of a token in every layer."""
    return [
        sum(side_row_bytes(spec.at(index), layer.side(side), fmt) for side in SIDES)
        for index, layer in enumerate(plan.layers)
    ]


def bytes_per_token(spec: ModelSpec, plan: Plan, fmt: str | None, n_ctx: int) -> float:
    """K and V of all layers, every stored segment in one format, or (None) in the plan's own: of a token of
    the context. What layers with a sliding window hold is shared by all tokens."""
    slots = MiddleSlots.of_plan(spec, plan, n_ctx)
    rows = zip(slots.layers, _layer_rows(spec, plan, fmt), strict=True)
    return sum(n * row for n, row in rows) / slots.whole


def exact_bytes_per_token(spec: ModelSpec, plan: Plan, fmt: str) -> int:
    """K and V of all layers, as an exact token holds them: full rows, or every segment where a side has
    form A."""

    def rows(index: int, layer: LayerPlan) -> tuple[SidePlan, SidePlan]:
        sides = layer.k, layer.v
        if not all(plan.form(spec.at(index), side) == "e" for side in sides):
            return sides
        return (OF_VALUE if layer.k == OF_VALUE else FULL, FULL)

    return sum(
        side_row_bytes(spec.at(index), side, fmt, whole=True)
        for index, layer in enumerate(plan.layers)
        for side in rows(index, layer)
    )


def planned_bytes_per_token(spec: ModelSpec, plan: Plan, n_ctx: int) -> float:
    """A token of the context under the plan's own formats: a middle row, or its share of middle and recent
    rows."""
    slots = MiddleSlots.of_plan(spec, plan, n_ctx)
    rows = zip(slots.layers, _layer_rows(spec, plan, None), strict=True)
    middle = sum(row for n, row in rows if n == slots.whole)
    recent = exact_bytes_per_token(spec, plan, plan.recent_format)
    return bytes_per_token(spec, plan, None, n_ctx) + plan.recent_ratio * (recent - middle)


def full_bytes_per_token(spec: ModelSpec, plan: Plan, n_ctx: int) -> float:
    """The f16 cache with full K and V in as many slots of every layer."""
    slots = MiddleSlots.of_plan(spec, plan, n_ctx)
    return slots.full_rows(spec) / slots.whole


def full_row_bytes(spec: ModelSpec, fmt: str, one_row: bool = False) -> int:
    """Full K and V of a token, of all layers. one_row: V alone where it is what the key projection makes."""
    shapes = [spec.at(layer) for layer in range(spec.n_layer)]
    return sum((1 if one_row and own.value_of_key else 2) * side_row_bytes(own, FULL, fmt) for own in shapes)


def region_slots(n_ctx: int, sink: int, recent: int, recent_ratio: float = 0.0) -> tuple[int, int]:
    """Slots for sinks and for recent tokens as the runtime allocates them for one sequence: the window, a
    batch on its way out of it and the tokens being computed."""
    latest = recent + DEMOTION_BATCH + math.ceil(recent_ratio * n_ctx) + EXACT_UBATCH
    keeps = recent > 0 or recent_ratio > 0
    return round_up(sink, EXACT_STEP), round_up(min(latest, n_ctx), EXACT_STEP) if keeps else 0


def cache_bytes(spec: ModelSpec, plan: Plan, n_ctx: int) -> int:
    """A whole cache of one sequence under the plan's own formats, with cells."""
    sinks, latest = region_slots(n_ctx, plan.sink, plan.recent, plan.recent_ratio)
    slots = MiddleSlots.of_plan(spec, plan, n_ctx)
    exact = (
        (sinks, exact_bytes_per_token(spec, plan, plan.sink_format)),
        (latest, exact_bytes_per_token(spec, plan, plan.recent_format)),
    )
    rows = (*exact, *zip(slots.layers, _layer_rows(spec, plan, None), strict=True))
    return sum(n * row for n, row in rows) + (sinks + latest + slots.cells) * CELL_BYTES


def full_cache_bytes(spec: ModelSpec, slots: MiddleSlots) -> int:
    """The f16 cache with full K and V in these slots, with cells."""
    return slots.full_rows(spec) + slots.cells * CELL_BYTES


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _up4(n: int) -> int:
    return round_up(n, 4)
