"""Palu (Chang et al., ICLR 2025): K and V as latents of groups of KV heads, K rebuilt before RoPE.

Per layer, side and group the projection's outputs are rotated into their principal axes, which is SVD-LLM's
whitened SVD of the weights (eigenvectors of the output moment M = Wᵀ C W), and cut at a rank; sigma is split
evenly over the two factors. Ranks come from an allocator under one exact budget for K and V of all layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import allocate
from ..ir import SIDES, Basis, LayerPlan, ModelSpec, Plan, SidePlan
from ..linalg import balanced, eigenbasis
from ..schema import RANK_PAD
from ..work import Work
from . import group_size, parse_group, parse_keep

SUMMARY = "Palu: grouped whitened SVD, K rebuilt before RoPE"


def add_arguments(parser: Any) -> None:
    parser.add_argument(
        "--keep",
        type=parse_keep,
        default=0.5,
        metavar="F",
        help="kept fraction of all KV dimensions (default 0.5)",
    )
    parser.add_argument(
        "--group",
        type=parse_group,
        default=4,
        metavar="N|all",
        help="KV heads that share one latent: 1 (M-LRD), 4 (G-LRD, default), all (J-LRD)",
    )
    parser.add_argument(
        "--allocate", choices=allocate.names(), default="fisher", help="how ranks are shared out"
    )
    parser.add_argument(
        "--basis",
        choices=("whitened", "plain"),
        default="whitened",
        help="SVD of the outputs, or of the weights alone",
    )


def create(options: Mapping[str, Any], spec: ModelSpec) -> Palu:
    group = group_size(options["group"], spec.n_kv)
    return Palu(group, options["keep"], options["allocate"], options["basis"])


@dataclass(frozen=True)
class Palu:
    group: int
    keep: float
    allocator: str
    basis: str

    @property
    def needs(self) -> tuple[str, ...]:
        moments = ("moments",) if self.basis == "whitened" else ()
        return moments + allocate.module(self.allocator).NEEDS

    def decompose(self, work: Work, layer: int, side: str) -> tuple[Basis, ...]:
        """One balanced basis per group from the diagonal blocks of the moment (or of W Wᵀ for the plain
        basis)."""
        if self.basis == "whitened":
            moment = np.asarray(work.stats["moments"][layer][side], dtype=np.float64)
        else:
            weight = work.weight(layer, side).astype(np.float64)
            moment = weight @ weight.T
        width = self.group * work.spec.head_dim
        blocks = [slice(begin, begin + width) for begin in range(0, work.spec.kv_width, width)]
        where = f"layer {layer} {side}"
        return tuple(balanced(*eigenbasis(moment[block, block], where)) for block in blocks)

    def plan(self, work: Work) -> Plan:
        spec = work.spec
        problem = allocate.RankProblem(
            n_layer=spec.n_layer,
            n_groups=spec.n_kv // self.group,
            group_width=self.group * spec.head_dim,
            keep=self.keep,
            pad=RANK_PAD,
            stats=work.stats,
            sigmas=work.sigmas,
        )
        ranks = allocate.module(self.allocator).allocate(problem)
        paths = {"k": "rebuild", "v": "latent"}
        layers = []
        for layer in range(spec.n_layer):
            sides = {
                side: SidePlan(
                    paths[side], self.group, ranks[layer, side], tuple((rank,) for rank in ranks[layer, side])
                )
                for side in SIDES
            }
            layers.append(LayerPlan(sides["k"], sides["v"]))
        return Plan(tuple(layers))
