"""Bytes of a plan's cache: of one token, and of the whole cache."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir import FULL, OF_VALUE, SIDES, LayerPlan, ModelSpec, Plan, SidePlan
from .sizes import MiddleSlots, cell_bytes, in_blocks, region_slots, row_bytes


def slots_of(spec: ModelSpec, plan: Plan, n_ctx: int) -> MiddleSlots:
    formats = (name for layer in plan.layers for group in layer.k.formats or () for name in group)
    recent = plan.recent > 0 or plan.recent_ratio > 0
    return MiddleSlots.of(spec, n_ctx, recent, any(in_blocks(name) for name in formats))


def side_row_bytes(spec: ModelSpec, plan: SidePlan, fmt: str | None, whole: bool = False) -> int:
    """One token of K or V of one layer; every group's segments one after another, the row rounded up to 4.

    spec: as the layer sees it. fmt None: the plan's own formats, f16 where it has none. What the plan drops
    takes nothing, unless `whole`.
    """
    if spec.shares_kv or plan == OF_VALUE:
        return 0
    segments: Sequence[Sequence[int]] = plan.segments or ((spec.head_dim,),) * spec.n_kv
    planned = plan.formats or tuple(("f16",) * len(widths) for widths in segments)

    def stored(name: str) -> str:
        return name if fmt is None or (name == "none" and not whole) else fmt

    groups = zip(planned, segments, strict=True)
    return row_bytes(tuple(tuple(zip(map(stored, names), widths, strict=True)) for names, widths in groups))


def _layer_rows(spec: ModelSpec, plan: Plan, fmt: str | None) -> list[int]:
    """Bytes of one token's K and V in every layer."""
    return [
        sum(side_row_bytes(spec.at(index).of_side(side), layer.side(side), fmt) for side in SIDES)
        * spec.attends(index)
        for index, layer in enumerate(plan.layers)
    ]


def bytes_per_token(spec: ModelSpec, plan: Plan, fmt: str | None, n_ctx: int) -> float:
    """Bytes of one token of the context, K and V of all layers, with every stored segment in format `fmt`, or
    (None) in the plan's own formats. The ring of layers with a sliding window is shared by all tokens."""
    slots = slots_of(spec, plan, n_ctx)
    rows = zip(slots.layers, _layer_rows(spec, plan, fmt), strict=True)
    return sum(n * row for n, row in rows) / slots.whole


def exact_bytes_per_token(spec: ModelSpec, plan: Plan, fmt: str) -> int:
    """Bytes of one exact token, K and V of all layers: full rows, or all segments of the latents in layers
    where a side has form A."""

    def rows(index: int, layer: LayerPlan) -> tuple[SidePlan, SidePlan]:
        if not _exact_is_full(spec, plan, index):
            return layer.k, layer.v
        return (OF_VALUE if layer.k == OF_VALUE else FULL, FULL)

    return sum(
        side_row_bytes(spec.at(index).of_side(name), side, fmt, whole=True)
        for index in spec.attention_layers
        for name, side in zip(SIDES, rows(index, plan.layers[index]), strict=True)
    )


def _exact_is_full(spec: ModelSpec, plan: Plan, index: int) -> bool:
    sides = plan.layers[index].k, plan.layers[index].v
    return spec.mla is None and all(plan.form(spec.at(index), side) == "e" for side in sides)


def _has_full_beside_latents(spec: ModelSpec, plan: Plan) -> bool:
    """Whether in every layer exact tokens are full rows, others latents."""
    return all(
        _exact_is_full(spec, plan, index)
        and {plan.layers[index].side(side).path for side in SIDES} != {"full"}
        for index in spec.row_layers
    )


def planned_bytes_per_token(spec: ModelSpec, plan: Plan, n_ctx: int) -> float:
    """Bytes of one token of the context in the plan's own formats: a middle row, or with a recent ratio the
    token's share of middle and recent rows."""
    slots = slots_of(spec, plan, n_ctx)
    rows = zip(slots.layers, _layer_rows(spec, plan, None), strict=True)
    middle = sum(row for n, row in rows if n == slots.whole)
    recent = exact_bytes_per_token(spec, plan, plan.recent_format)
    return bytes_per_token(spec, plan, None, n_ctx) + plan.recent_ratio * (recent - middle)


def full_bytes_per_token(spec: ModelSpec, plan: Plan, n_ctx: int) -> float:
    """Bytes of one token in an f16 cache of full K and V that has as many slots in every layer."""
    slots = slots_of(spec, plan, n_ctx)
    return slots.full_rows(spec) / slots.whole


def cache_bytes(spec: ModelSpec, plan: Plan, n_ctx: int) -> int:
    """Bytes of a whole cache of one sequence in the plan's own formats, cells included."""
    whole = _has_full_beside_latents(spec, plan)
    sinks, latest = region_slots(n_ctx, plan.sink, plan.recent, whole, plan.recent_ratio)
    slots = slots_of(spec, plan, n_ctx)
    exact = (
        (sinks, exact_bytes_per_token(spec, plan, plan.sink_format)),
        (latest, exact_bytes_per_token(spec, plan, plan.recent_format)),
    )
    rows = (*exact, *zip(slots.layers, _layer_rows(spec, plan, None), strict=True))
    return sum(n * row for n, row in rows) + (sinks + latest + slots.cells) * cell_bytes()
