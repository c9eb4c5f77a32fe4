"""Eigen Attention (Saxena et al., EMNLP-F 2024): per-head eigenbases, ranks from a search on measured block
errors.

With RoPE: one K basis shared by all KV heads of a layer, from keys before RoPE, rebuilt at read. Without:
per KV head from keys stacked with their queries, bias included, absorbed into the queries. V: per KV head.
All heads of a layer get the same rank (the largest that any needs), K and V by one threshold on the kept
energy.

The search of section 4 lowers a layer's threshold while the relative error of its decoder block's output,
run on the calibration text with the original inputs, stays below a budget that is the same for all layers.
Here that budget follows from --keep (or is given). The paper's Eq. 5 counts squared singular values; the
released code does not square them, counts one column less and steps the threshold by 0.02:
`--published-counting`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import limits
from ...fuse import center
from ...ir import F64, SIDES, Basis, ModelSpec, Plan
from ...schema import RANK_PAD
from ...work import Work
from .. import allocate, arguments, latent_plan, search
from ..allocate import Ranks
from ..linalg import balanced, eigenbasis, tied

SUMMARY = "Eigen Attention: per-head bases, ranks by measured block error"
STEP = 0.02  # of the threshold, published
FLOOR = 0.45  # of head_dim: the published search stops before a rank falls to it


def add_arguments(parser: Any) -> None:
    arguments.add_keep(parser, 0.6)
    parser.add_argument(
        "--error-budget",
        type=arguments.fraction("a relative error", above_zero=True),
        default=None,
        metavar="E",
        help="relative error of a block's output to allow, instead of --keep (published: 0.025)",
    )
    parser.add_argument(
        "--allocate",
        choices=("search", *allocate.names()),
        default="search",
        help="how ranks are divided among layers and groups (default search, the published one)",
    )
    parser.add_argument(
        "--k-basis",
        choices=("shared", "head"),
        default="shared",
        help="K with RoPE: one basis for all heads of a layer (default, published), or one per head",
    )
    parser.add_argument(
        "--published-counting",
        action="store_true",
        help="ranks from unsquared singular values and thresholds 1.00, 0.98, … as in the released code",
    )
    parser.add_argument(
        "--search-tokens",
        type=limits.positive,
        default=4096,
        metavar="N",
        help="tokens of the calibration sample to measure block errors on (default 4096)",
    )
    latent_plan.add_k_path(parser, "rebuild")


def create(options: Mapping[str, Any], spec: ModelSpec) -> Eigen:
    return Eigen(
        keep=options["keep"],
        error_budget=options["error_budget"],
        allocator=options["allocate"],
        shared=options["k_basis"] == "shared",
        published=options["published_counting"],
        search_tokens=options["search_tokens"],
        k_path=latent_plan.k_path(options, spec, "rebuild"),
    )


@dataclass(frozen=True)
class Eigen:
    keep: float
    error_budget: float | None
    allocator: str
    shared: bool
    published: bool
    search_tokens: int
    k_path: str

    @property
    def needs(self) -> tuple[str, ...]:
        queries = ("heads",) if self.k_path == "absorbed" else ()
        return (
            "moments",
            *queries,
            *(() if self.allocator == "search" else allocate.module(self.allocator).NEEDS),
        )

    def decompose(self, work: Work, layer: int, side: str, group: int) -> tuple[Basis, ...]:
        where, spec = f"layer {layer} {side}", work.spec
        if side == "k" and self.k_path == "absorbed":
            queries = np.asarray(work.stats["heads"][layer]["q"], dtype=np.float64)
            keys = head_blocks(center.key_covariance(work, layer), spec.head_dim)
            pairs = zip(keys, queries, strict=True)
            return tuple(tied(*eigenbasis(k + q, where), k, q) for k, q in pairs)
        blocks = head_blocks(center.covariance(work, layer, side), spec.head_dim)
        if side == "k" and self.shared:
            return (balanced(*eigenbasis(np.sum(blocks, axis=0), where)),) * spec.n_kv
        return tuple(balanced(*eigenbasis(block, where)) for block in blocks)

    def plan(self, work: Work) -> Plan:
        if self.allocator == "search":
            ranks = self.searched(work)
        else:
            ranks = latent_plan.ranks_of(work, 1, self.keep, self.allocator)
        return latent_plan.from_ranks(work.spec, 1, ranks, self.k_path)

    def searched(self, work: Work) -> Ranks:
        from .. import block_error  # imports torch

        spec = work.spec
        layers = spec.attention_layers
        sigmas = [{side: work.sigmas(layer, side, 1) for side in SIDES} for layer in layers]
        states = [thresholds(each, self.published) for each in sigmas]
        trials = [[{side: (rank[side],) * spec.n_kv for side in SIDES} for rank in layer] for layer in states]
        errors = block_error.measure(work, trials, self.search_tokens, per_token=not self.published)
        if self.error_budget is not None:
            return search.within(layers, states, errors, self.error_budget, spec.n_kv)
        return search.to_budget(latent_plan.problem(work, 1, self.keep), states, errors)


def thresholds(sigmas: Mapping[str, Sequence[F64]], published: bool) -> list[dict[str, int]]:
    """Ranks of K and V, padded, along a falling threshold, full rank first, each pair once.

    published: 1.00, 0.98, … while both ranks are above 0.45 of the head; else every threshold at which one
    changes.
    """
    if published:
        steps = np.arange(1.0, 0.0, -STEP)
    else:
        edges = [kept_energy(sigma, 2)[RANK_PAD - 1 :: RANK_PAD] for side in SIDES for sigma in sigmas[side]]
        steps = np.unique(np.concatenate(edges))[::-1]
    states: list[dict[str, int]] = []
    for step in steps:
        ranks = {side: max(count(sigma, float(step), published) for sigma in sigmas[side]) for side in SIDES}
        if published and any(ranks[side] <= FLOOR * len(sigmas[side][0]) for side in SIDES):
            break
        padded = {
            side: min(max(-(-rank // RANK_PAD), 1) * RANK_PAD, len(sigmas[side][0]))
            for side, rank in ranks.items()
        }
        if not states:
            states.append({side: len(sigmas[side][0]) for side in SIDES})
        if padded != states[-1]:
            states.append(padded)
    return states


def count(sigma: F64, threshold: float, published: bool) -> int:
    """Columns that a threshold keeps: the fewest whose energy reaches it; published: the most that stay
    below it, unsquared."""
    if published:
        return int((kept_energy(sigma, 1) < threshold).sum())
    return min(int((kept_energy(sigma, 2) < threshold).sum()) + 1, len(sigma))


def kept_energy(sigma: F64, power: int) -> F64:
    """Share of sum sigma^power in the first 1, 2, … columns."""
    total = np.cumsum(np.asarray(sigma, dtype=np.float64) ** power)
    share: F64 = total / max(float(total[-1]), np.finfo(np.float64).tiny)
    return share


def head_blocks(moment: F64, head_dim: int) -> list[F64]:
    """The diagonal blocks [head_dim, head_dim] of a moment [w, w]."""
    return [
        moment[begin : begin + head_dim, begin : begin + head_dim]
        for begin in range(0, len(moment), head_dim)
    ]
