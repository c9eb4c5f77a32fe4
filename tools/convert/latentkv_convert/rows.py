"""True bytes of a cached token, as the native row formats store it (native/src/cache/formats)."""

from __future__ import annotations

from collections.abc import Sequence

from .ir import SIDES, ModelSpec, Plan, SidePlan

FORMATS = ("f16", "q8", "q4", "q3", "q2")


def segment_bytes(fmt: str, width: int) -> int:
    """f16: 2 per channel. qN: scale and minimum in f16, then N bits per channel in 16s. gN: one f16 scale,
    rounded up."""
    if fmt == "none":
        return 0
    if fmt == "f16":
        return 2 * width
    bits = int(fmt[1:])
    return _up4((4 if fmt[0] == "q" else 2) + 2 * bits * -(-width // 16))


def side_row_bytes(spec: ModelSpec, plan: SidePlan, fmt: str) -> int:
    """One token of K or V of one layer; every group's segments one after another, the row rounded up to 4."""
    segments: Sequence[Sequence[int]] = plan.segments or ((spec.head_dim,),) * spec.n_kv
    return _up4(sum(segment_bytes(fmt, width) for widths in segments for width in widths))


def bytes_per_token(spec: ModelSpec, plan: Plan, fmt: str) -> int:
    """K and V of all layers, every segment in one format."""
    return sum(side_row_bytes(spec, layer.side(side), fmt) for layer in plan.layers for side in SIDES)


def full_bytes_per_token(spec: ModelSpec) -> int:
    """The uncompressed f16 cache."""
    return 2 * 2 * spec.n_layer * spec.kv_width


def _up4(n: int) -> int:
    return -(-n // 4) * 4
