"""Multi-head latent attention: shapes of its tensors, and the scale of its scores."""

from __future__ import annotations

import math

from ..ir import Mla, ModelSpec


def shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Role -> shape, of all tensors that a layer may have in place of Q, K and V; none without MLA."""
    mla = spec.mla
    if mla is None:
        return {}
    n_embd, queries = spec.n_embd, spec.n_head * mla.query
    return {
        "attn_q.weight": (queries, n_embd),
        "attn_q_a.weight": (mla.q_rank, n_embd),
        "attn_q_a_norm.weight": (mla.q_rank,),
        "attn_q_b.weight": (queries, mla.q_rank),
        "attn_kv_a_mqa.weight": (mla.row, n_embd),
        "attn_kv_a_norm.weight": (mla.kv_rank,),
        "attn_k_b.weight": (spec.n_head, mla.kv_rank, mla.n_key),
        "attn_v_b.weight": (spec.n_head, mla.n_value, mla.kv_rank),
        "attn_output.weight": (n_embd, spec.n_head * mla.n_value),
    }


def usual_scale(spec: ModelSpec, mla: Mla) -> float:
    """Of scores, where the block names none: native/src/decoder/rope.cpp, read_mla_scale."""
    keys, growth = spec.keys, 1.0
    if keys.get("rope.scaling.type") == "yarn":
        multiplier = float(keys.get("rope.scaling.yarn_log_multiplier") or 0.1)
        growth = 1 + multiplier * math.log(max(1.0, keys["rope.scaling.factor"]))
        growth *= float(keys.get("rope.scaling.attn_factor", 1.0))
    return growth * growth / math.sqrt(mla.query)
