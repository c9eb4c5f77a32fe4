"""Multi-head latent attention in torch, as the runtime computes it: one KV head, whose row is the turned
channels of the key and the latent; queries are taken to the latent, and what heads read of it to values.

live: a layer (decoder.py) with the modules attn_kv_a_mqa, attn_k_b … of its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...ir import Mla, ModelSpec
from ..positions import LayerPositions


def attended(
    live: Any, spec: ModelSpec, mla: Mla, x: Tensor, positions: LayerPositions, watch: Any
) -> Tensor:
    """[n, T, n_embd], the branch's output. watch("k", …) is shown what RoPE turns of keys [n, T, n_rot], and
    watch("v", …) latents [n, T, kv_rank], which are in keys and values alike."""
    turned, latents = (watch(*each)[:, None] for each in zip("kv", rows(live, mla, x), strict=True))
    k = torch.cat([positions.with_rope(turned), latents], dim=-1)
    q = _queries(live, x).unflatten(-1, (spec.n_head, -1)).transpose(1, 2)  # [n, n_head, T, query]
    absorbed = q[..., : mla.n_key] @ live.attn_k_b.weight.transpose(-1, -2)
    q = torch.cat([positions.with_rope(_paired(q[..., mla.n_key :])), absorbed], dim=-1)
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


def rows(live: Any, mla: Mla, x: Tensor) -> tuple[Tensor, Tensor]:
    """What RoPE turns of keys [n, T, n_rot], and latents [n, T, kv_rank]; x: the branch's input."""
    made = live.attn_kv_a_mqa(x)
    return _paired(made[..., mla.kv_rank :]), live.attn_kv_a_norm(made[..., : mla.kv_rank])


def as_made(
    rows: Mapping[str, Tensor], key: Tensor, value: Tensor, key_slope: Tensor, value_slope: Tensor
) -> dict[str, Tensor]:
    """Gradients of what attention reads, [1, 1, T, …], as [T, …] of `rows`: of latents through keys and
    values, and of turned channels back through RoPE."""
    n_rot = key.shape[-1] - value.shape[-1]
    after = torch.zeros_like(key)
    after[..., :n_rot] = key_slope[..., :n_rot]
    (before,) = torch.autograd.grad(key, [rows["k"]], after, retain_graph=True)
    return {"k": before[0], "v": (value_slope + key_slope[..., n_rot:])[0, 0]}


def _paired(x: Tensor) -> Tensor:
    """[..., n_rot], whose planes are neighbours, as planes (i, i + n_rot/2)."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
