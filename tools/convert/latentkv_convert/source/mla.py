"""Multi-head latent attention: shapes of its tensors."""

from __future__ import annotations

from ..ir import ModelSpec


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
