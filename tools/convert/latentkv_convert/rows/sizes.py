"""Bytes of rows and of recurrent states as the runtime stores them, and the row formats to choose from."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from latentkv.plan.formats import BLOCKS

from .. import native
from ..ir import SIDES, ModelSpec
from ..source import recurrent

# Row formats of sink and recent tokens where a plan is free to choose, the widest first. q8 has one scale for
# a head: with the 256 channels of Gemma 3 270M it costs 0.003 nats, q8_0 on all rows 0.0005.
EXACT_FORMATS = ("f16", "q8_0")


def exact_formats(spec: ModelSpec) -> tuple[str, ...]:
    """The EXACT_FORMATS that fit the model's heads: each head is one segment, and q8_0 needs blocks of 32."""
    widths = (spec.at(layer).of_side(side).head_dim for layer in range(spec.n_layer) for side in SIDES)
    taken = all(width % 32 == 0 for width in widths)
    return EXACT_FORMATS if taken else EXACT_FORMATS[:1]


def in_blocks(fmt: str) -> bool:
    """Whether rows lie in token blocks, which have a scale and a minimum per channel: K of old tokens."""
    return fmt in BLOCKS


def has_group_scales(formats: Iterable[str]) -> bool:
    """Whether the segments of a group share their scales (formats n8 … n1)."""
    return any(name[0] == "n" and name != "none" for name in formats)


@cache
def segment_bytes(fmt: str, width: int) -> int:
    """Bytes of one token's segment, as the runtime stores it."""
    return int(core().format_bytes(fmt, width))


@cache
def row_bytes(groups: tuple[tuple[tuple[str, int], ...], ...]) -> int:
    """Bytes of one token's row: (format, channels) of every group's segments."""
    return int(core().row_bytes(groups))


def group_scale_bytes() -> int:
    """Bytes of the scales at the beginning of a group whose segments share them."""
    return row_bytes(((("n8", 16),),)) - segment_bytes("n8", 16)


def demotion_batch() -> int:
    """The number of recent tokens that are compressed together."""
    return int(core().DEMOTION_BATCH)


def core() -> Any:
    return native.core("convert", "the runtime's row formats")


def state_bytes(spec: ModelSpec) -> int:
    """Bytes that recurrent layers keep of one sequence on their device, whatever its length: its state in
    f32, and an earlier one."""
    n_recurrent = sum(map(spec.recurs, range(spec.n_layer)))
    if not n_recurrent:
        return 0
    return int(core().STATE_SLOTS) * n_recurrent * 4 * recurrent.sizes(spec).state_floats
