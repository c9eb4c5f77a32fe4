"""The principal axes of a projection's outputs: SVD-LLM's whitened SVD of the weights, or the plain SVD."""

from __future__ import annotations

from typing import Any

from ..fuse import center
from ..ir import Basis
from ..work import Work
from .linalg import balanced, eigenbasis

BASES = ("whitened", "plain")


def add_basis(parser: Any) -> None:
    parser.add_argument(
        "--basis",
        choices=BASES,
        default="whitened",
        help="SVD of the outputs, or of the weights alone",
    )


def output_bases(work: Work, layer: int, side: str, group: int, basis: str) -> tuple[Basis, ...]:
    """One balanced basis per group of `group` KV heads, from the diagonal blocks of the output moment
    M = Wᵀ C W, about the mean where rows are centred (or of W Wᵀ for the plain basis)."""
    if basis == "whitened":
        moment = center.covariance(work, layer, side)
    else:
        weight = work.output_map(layer, side)
        moment = weight @ weight.T
    width = group * work.spec.head_dim
    blocks = [slice(begin, begin + width) for begin in range(0, work.spec.kv_width, width)]
    where = f"layer {layer} {side}"
    return tuple(balanced(*eigenbasis(moment[block, block], where)) for block in blocks)
