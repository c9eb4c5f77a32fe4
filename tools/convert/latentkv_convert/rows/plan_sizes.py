"""Bytes and slots of one sequence's cache, as the runtime allocates it on a GPU, where it takes the most: of
a plan, and what exact tokens take beside any."""

from __future__ import annotations

from typing import Any

from ..ir import OF_VALUE, SIDES, ModelSpec, Plan, SidePlan
from .sizes import core

Groups = tuple[tuple[tuple[str, int], ...], ...]  # of every group its segments: format, channels


def kv_bytes(spec: ModelSpec, plan: Plan, n_ctx: int, fmt: str | None = None) -> dict[str, Any]:
    """As Session.kv_bytes(), of one sequence and without states of recurrent layers. fmt: of every stored
    segment; None: the plan's own formats, f16 where it has none."""
    layers = [_layer(spec, plan, index, fmt) for index in range(spec.n_layer)]
    regions = plan.sink, plan.recent, plan.recent_ratio, plan.sink_format, plan.recent_format
    found: dict[str, Any] = core().plan_bytes(layers, n_ctx, *regions)
    return found


def of_heads(
    spec: ModelSpec, n_ctx: int, sink: int = 0, recent: int = 0, fmt: str = "f16", one_row: bool = False
) -> dict[str, Any]:
    """kv_bytes() with a latent of its own for every head: slots, exact tokens (in format `fmt`) and f16's
    bytes are those of all plans. one_row: as Shape's."""
    layers = [_heads(spec, index, one_row) for index in range(spec.n_layer)]
    found: dict[str, Any] = core().plan_bytes(layers, n_ctx, sink, recent, 0.0, fmt, fmt)
    return found


def _heads(spec: ModelSpec, index: int, one_row: bool) -> tuple[Any, ...]:
    """As _layer()."""
    own = spec.at(index)
    heads, window, none = (own.n_kv, own.head_dim), spec.window(index), (False, False, ())
    if not spec.makes_rows(index):
        return heads, window, 0, none, none
    if own.mla is not None:  # of whose row exact tokens hold the segments
        whole, rest = divmod(own.mla.row, 32)
        row = tuple(("f16", width) for width in (32,) * whole + (rest,) * (rest > 0))
        return (1, own.mla.row), window, own.mla.n_rot, none, (False, False, (row,))
    side = (False, True, ((("f16", own.head_dim),),) * own.n_kv)
    return heads, window, 0, none if one_row and own.value_of_key else side, side


def _layer(spec: ModelSpec, plan: Plan, index: int, fmt: str | None) -> tuple[Any, ...]:
    """KV heads and their width, the window, the channels of a row that are of the key alone, K and V."""
    own = spec.at(index)
    heads, window, none = (own.n_kv, own.head_dim), spec.window(index), (False, False, ())
    if not spec.makes_rows(index):
        return heads, window, 0, none, none
    k, v = (_side(own, plan, plan.layers[index].side(name), name, fmt) for name in SIDES)
    if own.mla is None:
        return heads, window, 0, k, v
    row = (v[0], v[1], (k[2][0] + v[2][0],))  # K and V are one row of V
    return (1, own.mla.row), window, own.mla.n_rot, none, row


def _side(
    spec: ModelSpec, plan: Plan, side: SidePlan, name: str, fmt: str | None
) -> tuple[bool, bool, Groups]:
    """Whether it is full, whether of form E, and its groups; none where K has no rows."""
    if side == OF_VALUE:
        return False, False, ()
    own = spec.of_side(name)
    segments = side.segments or ((own.head_dim,),) * own.n_kv
    planned = side.formats or tuple(("f16",) * len(widths) for widths in segments)
    groups = tuple(
        tuple(
            (each if fmt is None or each == "none" else fmt, width) for each, width in zip(*pair, strict=True)
        )
        for pair in zip(planned, segments, strict=True)
    )
    return side.path == "full", plan.form(spec, side) == "e", groups


def bytes_per_token(spec: ModelSpec, plan: Plan, fmt: str | None, n_ctx: int) -> float:
    """Bytes of one token of the context, K and V of all layers, with every stored segment in format `fmt`, or
    (None) in the plan's own formats. The ring of layers with a sliding window is shared by all tokens."""
    cache = kv_bytes(spec, plan, n_ctx, fmt)
    return float(sum(region["k"] + region["v"] for region in _compressed(cache)) / cache["n_cells"])


def planned_bytes_per_token(spec: ModelSpec, plan: Plan, n_ctx: int) -> float:
    """Bytes of one token of the context in the plan's own formats: a middle row, or with a recent ratio the
    token's share of middle and recent rows."""
    cache = kv_bytes(spec, plan, n_ctx)
    cells = sum(region["slots"] for region in _compressed(cache)) * cache["cell_bytes"]
    return float(cache["per_token"] - cells / cache["n_cells"])


def _compressed(cache: dict[str, Any]) -> list[dict[str, Any]]:
    """The regions of all tokens but exact ones."""
    return [region for region in cache["regions"] if region["name"] in ("middle", "ring")]
