"""Second moments of q and k as attention sees them, but before RoPE: after bias, clamp and norm.

Per layer that attends: k [w, w] of all KV heads together, and q [n_kv, head_dim, head_dim], added up over the
query heads of each KV head; both per token, float64, BOS included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from torch import Tensor

from ..ir import Array, ModelSpec
from ..recipe import Recipe
from .moments import means
from .stream import LayerStream, Seen

VERSION = 2


def sample(recipe: Recipe) -> tuple[int, int]:
    return recipe.calib_tokens, recipe.calib_window


def n_bytes(spec: ModelSpec) -> int:
    return 8 * sum(
        own.kv_width**2 + own.kv_width * own.head_dim for own in map(spec.at, spec.attention_layers)
    )


def collect(stream: LayerStream) -> Iterator[tuple[int, Mapping[str, Array]]]:
    return means(stream, lambda index, live: partial(_sums, stream.spec.at(index)))


def _sums(spec: ModelSpec, window: int, seen: Seen) -> dict[str, Tensor]:
    """Over one window's tokens: q [n_kv, head_dim, head_dim] and k [w, w]."""
    limit = spec.keys.get("attention.clamp_kqv")
    sums = {}
    for side in "qk":
        rows = seen.get(f"{side}_norm", seen[side])[0].flatten(1)  # [tokens, heads·head_dim]
        rows = (rows if limit is None else rows.clamp(-limit, limit)).double()
        if side == "k":
            sums[side] = rows.T @ rows
            continue
        of_kv_head = rows.unflatten(1, (spec.n_kv, -1, spec.head_dim)).transpose(0, 1).flatten(1, 2)
        sums[side] = of_kv_head.mT @ of_kv_head
    return sums
