"""ZACK (Zhang et al. 2024): K rotated per KV head after RoPE and cut, so that nothing is ever rebuilt; V
likewise.

K: eigenvectors of the moments of a group's keys and of the queries that read them, after RoPE, stacked; V:
of values and the rows of W_o, each normalised by its Frobenius norm (their scales are unrelated). Every
query head of a KV head shares its basis, as K is stored once. `--basis kq-svd` uses different projections
for the two sides instead, the best for every rank (arXiv 2512.05916). Moments after RoPE are averaged over
all positions of the served context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import limits
from ...errors import ConvertError
from ...fuse import center
from ...ir import F64, Basis, ModelSpec, Plan
from ...rows import served
from ...source.frequencies import frequencies
from ...work import Work
from .. import allocate, arguments, latent_plan
from ..linalg import eigenbasis, tied, untied
from . import group_size

SUMMARY = "ZACK: K rotated after RoPE and cut, per KV head"


def add_arguments(parser: Any) -> None:
    arguments.add_keep(parser)
    arguments.add_group(parser, 1, "KV heads that share one latent (default 1, as published)")
    parser.add_argument(
        "--allocate",
        choices=allocate.names(),
        default="removal",
        help="how ranks are divided (default removal: eq. 6, one removal rate for all heads)",
    )
    parser.add_argument(
        "--basis",
        choices=("k", "qk", "kq-svd"),
        default="qk",
        help="directions of K (V) alone, of K with Q (V with W_o; published), or two projections (KQ-SVD)",
    )
    parser.add_argument(
        "--served-context",
        type=limits.tokens(1, limits.SERVED_CONTEXT),
        default=None,
        metavar="N",
        help="positions that the bases of K are fitted for (default: the model's context length)",
    )
    latent_plan.add_k_path(parser, "rotated")


def create(options: Mapping[str, Any], spec: ModelSpec) -> ZACK:
    """Raises:
    ConvertError: a group or K path that does not fit the model.
    """
    path = latent_plan.k_path(options, spec, "rotated")
    context = options["served_context"]
    if spec.block.position != "rope" and context is not None:
        raise ConvertError("--served-context", "a model with RoPE", f"{spec.block.position} positions")
    if spec.block.position == "rope":
        context = context or spec.n_ctx
    group = group_size(options["group"], spec.n_kv)
    return ZACK(group, options["keep"], options["allocate"], options["basis"], path, context)


@dataclass(frozen=True)
class ZACK:
    group: int
    keep: float
    allocator: str
    basis: str
    k_path: str
    context: int | None  # None: no RoPE

    @property
    def needs(self) -> tuple[str, ...]:
        return ("moments", "heads", *allocate.module(self.allocator).NEEDS)

    def decompose(self, work: Work, layer: int, side: str, group: int) -> tuple[Basis, ...]:
        cached, readers = self.moments_k(work, layer) if side == "k" else moments_v(work, layer)
        width = group * work.spec.head_dim
        bases = []
        for index, begin in enumerate(range(0, work.spec.kv_width, width)):
            block = slice(begin, begin + width)
            read = block_diagonal(readers[index * group : (index + 1) * group])
            bases.append(self._basis(cached[block, block], read, side, f"layer {layer} {side}"))
        return tuple(bases)

    def _basis(self, cached: F64, read: F64, side: str, where: str) -> Basis:
        """cached [group·head_dim, same]; read: the same shape, one block per KV head."""
        if self.basis == "kq-svd":
            return untied(cached, read, where)
        stack = cached
        if self.basis == "qk":
            stack = cached + read if side == "k" else normalised(cached) + normalised(read)
        return tied(*eigenbasis(stack, where), cached, read)

    def moments_k(self, work: Work, layer: int) -> tuple[F64, F64]:
        """k [w, w] and its queries [n_kv, head_dim, head_dim] as they meet in the scores."""
        stats, spec = work.stats["heads"][layer], work.spec
        q = np.asarray(stats["q"], dtype=np.float64)
        if self.context is None:
            return center.key_covariance(work, layer), q
        k = np.asarray(stats["k"], dtype=np.float64)
        freqs = frequencies(spec, self.context, layer)
        after = [served.after_rope(head, freqs, spec.head_dim, self.context) for head in q]
        return served.after_rope(k, freqs, spec.head_dim, self.context), np.stack(after)

    def plan(self, work: Work) -> Plan:
        ranks = latent_plan.ranks_of(work, self.group, self.keep, self.allocator)
        return latent_plan.from_ranks(work.spec, self.group, ranks, self.k_path, self.context)


def moments_v(work: Work, layer: int) -> tuple[F64, F64]:
    """v [w, w] and W_o as what reads it: [n_kv, head_dim, head_dim], added up over a KV head's query
    heads."""
    spec = work.spec
    heads = work.output_weight(layer).astype(np.float64).reshape(spec.n_embd, spec.n_head, spec.head_dim)
    squares = np.einsum("dhi,dhj->hij", heads, heads, optimize=True)
    read = squares.reshape(spec.n_kv, -1, spec.head_dim, spec.head_dim).sum(1)
    return center.covariance(work, layer, "v"), read


def block_diagonal(blocks: F64) -> F64:
    """[n, h, h] -> [n·h, n·h]"""
    n, size, _ = blocks.shape
    full = np.zeros((n * size, n * size))
    for index, block in enumerate(blocks):
        part = slice(index * size, (index + 1) * size)
        full[part, part] = block
    return full


def normalised(moment: F64) -> F64:
    """A second moment of rows whose Frobenius norm is 1."""
    return moment / max(float(np.trace(moment)), np.finfo(np.float64).tiny)
