"""Bytes and slots of one sequence's cache as the runtime allocates them on a GPU, where it takes the most."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
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


def cell_bytes() -> int:
    """Bytes of a slot's position and sequences, which all layers share."""
    return int(core().CELL_BYTES)


def demotion_batch() -> int:
    """The number of recent tokens that are compressed together."""
    return int(core().DEMOTION_BATCH)


def core() -> Any:
    return native.core("convert", "the runtime's row formats")


@dataclass(frozen=True)
class MiddleSlots:
    """Slots of compressed rows, of one sequence."""

    layers: tuple[int, ...]  # of every layer; 0: it does not attend
    whole: int  # of the context, in layers that see all of it
    ring: int  # in those that see a window, 0: there are none

    @staticmethod
    def of(spec: ModelSpec, n_ctx: int, recent: bool) -> MiddleSlots:
        """The slots that the runtime allocates. recent: whether there are recent tokens."""
        windows = [spec.window(layer) if spec.attends(layer) else 0 for layer in range(spec.n_layer)]
        slots = core().cache_slots(n_ctx, 0, int(recent), 0.0, True, windows)
        whole, ring = slots["middle"], slots["ring"]
        held = [ring if in_ring else whole for in_ring in slots["in_ring"]]
        return MiddleSlots(tuple(n * spec.attends(layer) for layer, n in enumerate(held)), whole, ring)

    @property
    def cells(self) -> int:
        """The number of slots with a position and sequences of their own."""
        return self.whole + self.ring

    def full_rows(self, spec: ModelSpec) -> int:
        """Bytes of full K and V in f16 in these slots."""
        shapes = [spec.at(layer) for layer in range(spec.n_layer)]
        held = zip(shapes, self.layers, strict=True)
        return sum(2 * own.row_width * n for own, n in held if not own.shares_kv)


def full_row_bytes(spec: ModelSpec, fmt: str, one_row: bool = False) -> int:
    """Bytes of one token's full K and V in all layers, with every head a segment. one_row: layers whose V is
    what the key projection makes have a row of V alone."""
    heads = [spec.at(layer) for layer in spec.attention_layers]
    if spec.mla is not None:
        # exact tokens hold a plan's segments, of 32 channels where it has so many
        whole, rest = divmod(spec.mla.row, 32)
        row = whole * segment_bytes(fmt, 32) + (segment_bytes(fmt, rest) if rest else 0)
        return len(heads) * whole_words(row)
    sides = [(1 if one_row and own.value_of_key else 2) * (not own.shares_kv) for own in heads]
    rows = [whole_words(own.n_kv * segment_bytes(fmt, own.head_dim)) for own in heads]
    return sum(n * row for n, row in zip(sides, rows, strict=True))


def region_slots(
    n_ctx: int, sink: int, recent: int, full_beside_latents: bool, recent_ratio: float = 0.0
) -> tuple[int, int]:
    """Slots for sinks and for recent tokens as the runtime allocates them for one sequence.
    full_beside_latents: in every layer exact tokens are full rows, others latents."""
    slots = core().cache_slots(n_ctx, sink, recent, recent_ratio, full_beside_latents, [])
    return slots["sink"], slots["recent"]


def full_cache_bytes(spec: ModelSpec, slots: MiddleSlots) -> int:
    """Bytes of an f16 cache of full K and V in these slots, cells included."""
    return slots.full_rows(spec) + slots.cells * cell_bytes()


def state_bytes(spec: ModelSpec) -> int:
    """Bytes that recurrent layers keep of one sequence on their device, whatever its length: its state in
    f32, and an earlier one."""
    n_recurrent = sum(map(spec.recurs, range(spec.n_layer)))
    if not n_recurrent:
        return 0
    return int(core().STATE_SLOTS) * n_recurrent * 4 * recurrent.sizes(spec).state_floats


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def whole_words(n_bytes: int) -> int:
    """A row is whole words of 4 bytes."""
    return round_up(n_bytes, 4)
