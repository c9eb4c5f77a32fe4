"""RoPE as a reader of the file computes it (docs/gguf.md, native/src/decoder/rope.cpp): frequencies, and in
which rows a head's planes lie."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..ir import F64, ModelSpec


def frequencies(spec: ModelSpec, context: int, layer: int) -> F64:
    """[n_rot/2] radians per position, for a sequence of `context` tokens; 0 in a layer without RoPE."""
    keys, rope, spec = spec.keys, spec.rope(layer), spec.at(layer)
    if rope.base == 0:
        return np.zeros(spec.n_rot // 2)
    base = _base(spec, context, rope.base) if rope.is_scaled else rope.base
    plain: F64 = base ** (-np.arange(0, spec.n_rot, 2, dtype=np.float64) / spec.n_rot)
    if not rope.is_scaled:
        return plain
    freqs: F64 = plain / _divisors(spec, context)
    scaling = keys.get("rope.scaling.type", "none")
    if scaling == "none":
        return freqs
    keep = _extrapolated(keys, base, spec, _original(spec)) if scaling == "yarn" else 0.0
    return freqs / keys.get("rope.scaling.factor", 1.0) * (1 - keep) + freqs * keep


def magnitude(spec: ModelSpec, layer: int) -> float:
    """What cos and sin are multiplied by."""
    if not spec.rope(layer).is_scaled:
        return 1.0
    scale = float(spec.keys.get("rope.scaling.attn_factor", 1.0))
    multiplier = float(spec.keys.get("rope.scaling.yarn_log_multiplier") or 0.0)
    of_scores = spec.mla is not None and multiplier > 0
    if spec.keys.get("rope.scaling.type") == "yarn" and not of_scores:
        growth = 0.1 * math.log(max(1.0, spec.keys["rope.scaling.factor"]))
        scale *= (1 + growth) / (1 + multiplier * growth)
    return scale


def temperatures(spec: ModelSpec, n: int) -> F64 | None:
    """[n] factors of the queries at these positions, or None: 1 everywhere."""
    growth = float(spec.keys.get("attention.temperature_scale", 0.0))
    return 1 + growth * np.log1p(np.arange(n) // _original(spec)) if growth else None


def paired_rows(n_heads: int, head_dim: int, n_rot: int) -> NDArray[np.int64]:
    """Source row of every file row in GGUF's `norm` pairing: file rows 2i and 2i+1 of a head are its rows i
    and i + n_rot/2, which transformers rotates together.

    Applies to the head dimensions of W_q, W_k, their biases, B_k and E; never to a latent's own axis.
    """
    head = np.arange(head_dim)
    head[:n_rot] = np.arange(n_rot).reshape(2, n_rot // 2).T.reshape(-1)
    rows: NDArray[np.int64] = (np.arange(n_heads)[:, None] * head_dim + head[None, :]).reshape(-1)
    return rows


def _original(spec: ModelSpec) -> int:
    return int(spec.keys.get("rope.scaling.original_context_length", spec.n_ctx))


def _base(spec: ModelSpec, context: int, base: float) -> float:
    """Dynamic NTK raises it past the trained context."""
    factor = spec.latentkv_keys.get("rope_dynamic_factor", 0.0)
    if factor > 0 and context > spec.n_ctx:
        base *= (factor * context / spec.n_ctx - (factor - 1)) ** (spec.n_rot / (spec.n_rot - 2))
    return base


def _divisors(spec: ModelSpec, context: int) -> F64:
    long = "rope_factors_long.weight" if context > _original(spec) else "rope_factors_short.weight"
    for name in ("rope_freqs.weight", long):
        if name in spec.extra_tensors:
            return spec.extra_tensors[name].astype(np.float64)
    return np.ones(spec.n_rot // 2)


def _extrapolated(keys: Mapping[str, Any], base: float, spec: ModelSpec, original: int) -> F64:
    """YaRN (Peng et al. 2023, eq. 17-23): 1 where a plane keeps its frequency, 0 where it is divided, a ramp
    between."""

    n_rot = spec.n_rot

    def dimension(rotations: float) -> float:
        return n_rot * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    first = dimension(keys.get("rope.scaling.yarn_beta_fast", 32.0))
    last = dimension(keys.get("rope.scaling.yarn_beta_slow", 1.0))
    if spec.block.yarn_truncate:
        first, last = math.floor(first), math.ceil(last)
    low, high = max(0, first), min(n_rot - 1, last)
    return 1 - np.clip((np.arange(n_rot // 2) - low) / max(0.001, high - low), 0, 1)
