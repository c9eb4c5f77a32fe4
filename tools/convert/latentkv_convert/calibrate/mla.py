"""Multi-head latent attention in torch, as the runtime computes it: one KV head, whose row is the turned
channels of the key and the latent; queries are taken to the latent, and what heads read of it to values.

live: a layer (decoder.py) with the modules attn_kv_a_mqa, attn_k_b … of its tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..ir import Mla, ModelSpec
from .positions import LayerPositions


def attended(live: Any, spec: ModelSpec, mla: Mla, x: Tensor, positions: LayerPositions, watch: Any) -> Tensor:
    """[n, T, n_embd], the branch's output. watch("v", …) is shown latents [n, T, kv_rank], and what it returns
    takes their place in keys and values alike."""
    rows = live.attn_kv_a_mqa(x)
    latents = watch("v", live.attn_kv_a_norm(rows[..., : mla.kv_rank]))[:, None]  # [n, 1, T, kv_rank]
    k = torch.cat([_turned(positions, rows[:, None, :, mla.kv_rank :]), latents], dim=-1)
    q = _queries(live, x).unflatten(-1, (spec.n_head, -1)).transpose(1, 2)  # [n, n_head, T, query]
    absorbed = q[..., : mla.n_key] @ live.attn_k_b.weight.transpose(-1, -2)
    q = torch.cat([_turned(positions, q[..., mla.n_key :]), absorbed], dim=-1)
    read = functional.scaled_dot_product_attention(
        q,
        k,
        latents,
        attn_mask=positions.mask,
        is_causal=positions.mask is None,
        scale=spec.attention_scale,
        enable_gqa=spec.n_head > 1,
    )
    values = read @ live.attn_v_b.weight.transpose(-1, -2)  # [n, n_head, T, n_value]
    output: Tensor = live.attn_output(values.transpose(1, 2).flatten(2))
    return output


def _queries(live: Any, x: Tensor) -> Tensor:
    if live._modules.get("attn_q") is not None:
        output: Tensor = live.attn_q(x)
        return output
    found: Tensor = live.attn_q_b(live.attn_q_a_norm(live.attn_q_a(x)))
    return found


def _turned(positions: LayerPositions, x: Tensor) -> Tensor:
    """[n, heads, T, n_rot], whose planes are pairs of neighbours, after RoPE; then first channels of planes
    come first."""
    return positions.with_rope(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2))
