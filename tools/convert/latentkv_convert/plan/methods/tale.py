"""TALE: K whole, V truncated in old tokens; bits and ranks by region.

Sink and recent tokens keep K and V whole. Of V a token that leaves the recent window keeps the first r_0
principal axes of a group's outputs, with sigma split evenly over the two factors. K is never low-rank and
follows the bits of the regions alone, per token or, in old tokens, per channel.
In a file without exact tokens whose prompts are lazy V has all its axes, which are what makes prompts exact;
the rotation stays inside [0, r_0) and inside the rest, so that the cut stays legal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from latentkv.plan.formats import BLOCKS

from ...errors import ConvertError
from ...ir import FULL, Basis, LayerPlan, ModelSpec, Plan, SidePlan
from ...rows import sizes
from ...schema import ENUMS, RANK_PAD
from ...work import Work
from .. import arguments
from ..budget import split_groups, water_fill
from ..output_basis import add_basis, output_bases
from . import group_size

SUMMARY = "TALE: K whole, V truncated in old tokens only, bits by region"
FORMATS = ("f32", "f16", "q8", "q6", "q5", "q4", "q3", "q2", "q1")


def add_arguments(parser: Any) -> None:
    arguments.add_keep(parser, 0.75)
    arguments.add_group(
        parser,
        0,
        "KV heads that share one latent of V; default 1 with grouped queries, else 4 or the next fewer "
        "that divide the model's",
    )
    add_basis(parser)
    arguments.add_exact(
        parser, "first tokens kept exact, in f16", "at least this many latest tokens kept exact", 0
    )
    parser.add_argument(
        "--recent-ratio",
        type=arguments.fraction("a ratio"),
        default=0.1,
        metavar="P",
        help="latest tokens kept exact, as a share of the sequence after its sinks (default 0.1)",
    )
    parser.add_argument(
        "--kv-recent", choices=FORMATS, default="q4", help="row format of recent tokens (default q4)"
    )
    parser.add_argument(
        "--kv-middle",
        choices=FORMATS + BLOCKS,
        default="q2",
        help="row format of all others (default q2); c8 c4 c3 c2: K per channel in blocks of 32 tokens "
        "(KIVI), V per token in as many bits",
    )
    parser.add_argument(
        "--prefill",
        choices=ENUMS["prefill"],
        default=None,
        help="a prompt attends to exact K and V, or to the compressed past (default lazy, where all layers "
        "attend)",
    )


def create(options: Mapping[str, Any], spec: ModelSpec) -> Tale:
    chosen = options["group"]
    if chosen == 0:
        largest = 1 if spec.n_head > spec.n_kv else 4
        chosen = max(n for n in range(1, largest + 1) if spec.n_kv % n == 0)
    group = group_size(chosen, spec.n_kv)
    least = 0.5 + 0.5 * RANK_PAD / (group * spec.head_dim)
    if options["keep"] < least:
        raise ConvertError(
            "--keep",
            f"at least {least:.4g} (K whole, rank {RANK_PAD} of V)",
            f"{options['keep']:g}",
            "or a larger --group",
        )
    middle = options["kv_middle"]
    if sizes.in_blocks(middle) and options["recent"] == 0 and options["recent_ratio"] == 0:
        raise ConvertError("--recent", f"recent tokens beside {middle}, whose blocks of 32 wait there", "0")
    attends = len(spec.attention_layers) == spec.n_layer
    if options["prefill"] == "lazy" and not attends:
        raise ConvertError("--prefill", "eager, as some layers are recurrent", "lazy")
    prefill = options["prefill"] or ("lazy" if attends else "eager")
    regions = (options["sink"], options["recent"], options["recent_ratio"])
    formats = (options["kv_recent"], options["kv_middle"])
    return Tale(group, options["keep"], options["basis"], *regions, *formats, prefill)


@dataclass(frozen=True)
class Tale:
    group: int
    keep: float
    basis: str
    sink: int
    recent: int
    recent_ratio: float
    kv_recent: str
    kv_middle: str
    prefill: str

    @property
    def needs(self) -> tuple[str, ...]:
        return ("moments",) if self.basis == "whitened" else ()

    def decompose(self, work: Work, layer: int, side: str, group: int) -> tuple[Basis, ...]:
        return output_bases(work, layer, side, group, self.basis)

    def plan(self, work: Work) -> Plan:
        n_kv = work.spec.n_kv
        k = SidePlan("full", formats=((self.kv_middle,),) * n_kv)
        layers = [LayerPlan(FULL, FULL)] * work.spec.n_layer
        for layer, ranks in zip(work.spec.attention_layers, self.kept_ranks(work), strict=True):
            layers[layer] = LayerPlan(k, self.nested(work, ranks))
        return Plan(
            tuple(layers),
            sink=self.sink,
            recent=self.recent,
            recent_ratio=self.recent_ratio,
            recent_format=self.kv_recent,
            prefill=self.prefill,
        )

    def kept_ranks(self, work: Work) -> list[tuple[int, ...]]:
        """r_0 of every group of the layers that attend: equal shares of what --keep leaves to V, as K keeps
        everything."""
        spec = work.spec
        width = self.group * spec.head_dim
        n_groups, capacity = spec.n_kv // self.group, -(-width // RANK_PAD)
        layers = spec.attention_layers
        low = np.full(len(layers), n_groups, dtype=np.int64)
        high = low * capacity
        total = round((2 * self.keep - 1) * len(layers) * spec.kv_width / RANK_PAD)
        units = water_fill(np.ones(len(layers)), low, high, min(total, int(high.sum())))
        ranks = []
        for layer, share in zip(layers, units, strict=True):
            counts = split_groups(int(share), work.sigmas(layer, "v", self.group), capacity, RANK_PAD)
            ranks.append(tuple(min(count * RANK_PAD, width) for count in counts))
        return ranks

    def nested(self, work: Work, kept: tuple[int, ...]) -> SidePlan:
        """Every column, cut at r_0; the columns after it are dropped in the middle."""
        width = self.group * work.spec.head_dim
        whole = (width,) * len(kept)
        segments = tuple((rank, width - rank) if rank < width else (width,) for rank in kept)
        per_token = self.kv_middle.replace("c", "q")
        formats = tuple((per_token, "none")[: len(widths)] for widths in segments)
        return SidePlan("latent", self.group, whole, segments, formats)
