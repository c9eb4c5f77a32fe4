"""Palu (Chang et al., ICLR 2025): K and V as latents of groups of KV heads, K rebuilt before RoPE; without
RoPE queries move into K's latent instead.

Per layer, side and group the projection's outputs are rotated into their principal axes, which is SVD-LLM's
whitened SVD of the weights (eigenvectors of the output moment M = Wᵀ C W), and cut at a rank; sigma is split
evenly over the two factors. Ranks come from an allocator under one exact budget for K and V of all layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...ir import Basis, ModelSpec, Plan
from ...work import Work
from .. import allocate, arguments, latent_plan
from ..output_basis import add_basis, output_bases
from . import group_size

SUMMARY = "Palu: grouped whitened SVD, K rebuilt before RoPE"


def add_arguments(parser: Any) -> None:
    arguments.add_keep(parser)
    arguments.add_group(
        parser,
        0,
        "KV heads that share one latent: 1 (M-LRD), 4 (G-LRD), all (J-LRD); default 4, or the next "
        "fewer that divide the model's",
    )
    parser.add_argument(
        "--allocate",
        choices=allocate.names(),
        default="fisher",
        help="how ranks are divided among layers and groups",
    )
    add_basis(parser)
    latent_plan.add_k_path(parser, "rebuild")


def create(options: Mapping[str, Any], spec: ModelSpec) -> Palu:
    chosen = options["group"]
    if chosen == 0:
        chosen = max(n for n in range(1, 5) if spec.n_kv % n == 0)
    group = group_size(chosen, spec.n_kv)
    path = latent_plan.k_path(options, spec, "rebuild")
    return Palu(group, options["keep"], options["allocate"], options["basis"], path)


@dataclass(frozen=True)
class Palu:
    group: int
    keep: float
    allocator: str
    basis: str
    k_path: str = "rebuild"

    @property
    def needs(self) -> tuple[str, ...]:
        moments = ("moments",) if self.basis == "whitened" else ()
        return moments + allocate.module(self.allocator).NEEDS

    def decompose(self, work: Work, layer: int, side: str, group: int) -> tuple[Basis, ...]:
        return output_bases(work, layer, side, group, self.basis)

    def plan(self, work: Work) -> Plan:
        ranks = latent_plan.ranks_of(work, self.group, self.keep, self.allocator)
        return latent_plan.from_ranks(work.spec, self.group, ranks, self.k_path)
