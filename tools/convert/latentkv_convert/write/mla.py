"""Multi-head latent attention in the file: one row of V, and factors in attn_k_b and attn_v_b.

With E = downᵀ a token's latent is z = E (c - mu), c the normed latent of the model, and c ≈ mu + upᵀ z. So
attn_k_b takes queries to z, and attn_v_b makes values of what they read of it; mu adds the same to all
scores of a query, and to a head's output its values, which attn_output.bias has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from ..fuse import center
from ..ir import F32, F64, OF_VALUE, Basis, LayerPlan, Plan
from ..schema import TENSORS
from ..weights.tensor import OutTensor
from ..work import Work

_ROLES = ("attn_k_b.weight", "attn_v_b.weight")


def replaced(work: Work, plan: Plan) -> frozenset[str]:
    """Names of the model's own tensors that the plan replaces."""
    if work.spec.mla is None:
        return frozenset()
    layers = [index for index, layer in enumerate(plan.layers) if layer.v.path == "latent"]
    return frozenset(f"blk.{index}.{role}" for index in layers for role in _ROLES)


def in_one_row(plan: Plan) -> Plan:
    """As a file describes it: rows of V begin with the turned channels."""
    return replace(plan, layers=tuple(map(_one_row, plan.layers)))


def _one_row(layer: LayerPlan) -> LayerPlan:
    k, v = layer.k, layer.v
    formats = None
    if k.formats is not None and v.formats is not None:
        formats = (k.formats[0] + v.formats[0],)
    ranks, segments = (k.ranks[0] + v.ranks[0],), (k.segments[0] + v.segments[0],)
    return LayerPlan(OF_VALUE, replace(v, ranks=ranks, segments=segments, formats=formats))


def tensors(work: Work, layer: int, factors: Callable[[], tuple[Basis, ...]]) -> Iterator[OutTensor]:
    """E, its mean, and both factors of the heads. factors: of V, one group."""
    spec, source = work.spec, work.source
    assert spec.mla is not None
    rank, mean = factors()[0].down.shape[1], center.mean(work, layer, "v")
    n_head, kv_rank = spec.n_head, spec.mla.kv_rank

    def encoder() -> F32:
        return np.ascontiguousarray(factors()[0].down.T, dtype=np.float32)

    def keys() -> F32:
        up = factors()[0].up.astype(np.float32)
        return np.stack([up @ head for head in source.tensor(_ROLES[0], layer)])

    def values() -> F32:
        up = factors()[0].up.astype(np.float32)
        return np.stack([head @ up.T for head in source.tensor(_ROLES[1], layer)])

    yield OutTensor(TENSORS["attn_v_e"].format(layer=layer), (rank, kv_rank), "factor", encoder)
    yield OutTensor(f"blk.{layer}.{_ROLES[0]}", (n_head, rank, spec.mla.n_key), "weight", keys)
    yield OutTensor(f"blk.{layer}.{_ROLES[1]}", (n_head, spec.mla.n_value, rank), "weight", values)
    if mean is not None:
        less = (-mean).astype(np.float32)
        yield OutTensor(TENSORS["attn_v_e_bias"].format(layer=layer), (kv_rank,), "vector", lambda: less)
        bias = _of_output(work, layer, mean)
        yield OutTensor(f"blk.{layer}.attn_output.bias", bias.shape, "vector", lambda: bias)


def _of_output(work: Work, layer: int, mean: F64) -> F32:
    """[n_embd]: what the mean adds to the layer's output through the values."""
    values = work.source.tensor(_ROLES[1], layer).astype(np.float64) @ mean  # [n_head, n_value]
    return (work.output_weight(layer).astype(np.float64) @ values.reshape(-1)).astype(np.float32)
