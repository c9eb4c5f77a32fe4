"""Logits of Qwen3_5ForCausalLM without a cache, as a CUDA graph can hold them.

transformers' module asks the host in between (masks, kernels by their names), and its chunked delta rule
makes hundreds of small kernels in each layer. The parameters here are the module's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 64  # tokens, a power of two
SMALLEST = 8  # rows that are inverted by powers


def inverse(lower: Tensor) -> Tensor:
    """Inverse of [..., n, n], lower triangular with ones on the diagonal; n is a power of two."""
    n = lower.shape[-1]
    if n <= SMALLEST:
        one = torch.eye(n, device=lower.device)
        power, found = one - lower, 2 * one - lower
        for _ in range(n.bit_length() - 2):  # 1 + x + x² + … of x = 1 - lower, whose n-th power is 0
            power = power @ power
            found = found + found @ power
        return found
    half = n // 2
    top, below = inverse(torch.stack([lower[..., :half, :half], lower[..., half:, half:]])).unbind(0)
    corner = -(below @ lower[..., half:, :half] @ top)
    rows = torch.cat([top, torch.zeros_like(top)], -1), torch.cat([corner, below], -1)
    return torch.cat(rows, -2)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """[batch, heads, tokens, head_v]; q, k, v: [batch, heads, tokens, …], decay (a logarithm), beta: without
    the last dimension. The number of tokens is a multiple of CHUNK."""

    def chunked(x: Tensor) -> Tensor:
        return x.float().unflatten(2, (-1, CHUNK))

    q, k, v, decay, beta = (chunked(x) for x in (q, k, v, decay, beta))
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * q.shape[-1] ** -0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    total = decay.cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    slower = k * beta[..., None]
    system = (slower @ k.mT * between).tril(-1) + torch.eye(CHUNK, device=q.device)
    solved = inverse(system)
    values, keys = solved @ (v * beta[..., None]), solved @ (slower * total.exp()[..., None])
    inside = q @ k.mT * between
    q = q * total.exp()[..., None]
    written = (k * (total[..., -1:] - total).exp()[..., None]).mT
    kept = total[..., -1].exp()[..., None, None]
    state = torch.zeros(*q.shape[:2], q.shape[-1], v.shape[-1], device=q.device)
    states, news = [], []
    parts = zip(values.unbind(2), keys.unbind(2), written.unbind(2), kept.unbind(2), strict=True)
    for value, key, write, keep in parts:
        states.append(state)
        news.append(value - key @ state)
        state = state * keep + write @ news[-1]
    read = q @ torch.stack(states, 2) + inside @ torch.stack(news, 2)
    return read.flatten(2, 3)


def delta_net(layer: Any, x: Tensor) -> Tensor:
    """A layer's linear_attn."""
    n_batch, n_tokens, _ = x.shape
    mixed, taps = F.pad(layer.in_proj_qkv(x), (0, 0, layer.conv_kernel_size - 1, 0)), layer.conv1d.weight
    mixed = sum(mixed[:, at : at + n_tokens] * taps[:, 0, at] for at in range(layer.conv_kernel_size))
    q, k, v = F.silu(mixed).split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
    q, k, v = (
        part.unflatten(-1, (-1, head)).transpose(1, 2)
        for part, head in ((q, layer.head_k_dim), (k, layer.head_k_dim), (v, layer.head_v_dim))
    )
    q, k = (repeated(part, layer.num_v_heads // layer.num_k_heads) for part in (q, k))
    beta = layer.in_proj_b(x).sigmoid().mT
    decay = -layer.A_log.exp() * F.softplus(layer.in_proj_a(x).float() + layer.dt_bias)
    with torch.autocast(x.device.type, enabled=False):
        read = delta_rule(q, k, v, decay.mT, beta).transpose(1, 2)
    gate = layer.in_proj_z(x).view(n_batch, n_tokens, -1, layer.head_v_dim)
    read = read * torch.rsqrt(read.square().mean(-1, keepdim=True) + layer.layer_norm_epsilon)
    return layer.out_proj((layer.norm.weight * read * F.silu(gate.float())).flatten(2))


def repeated(heads: Tensor, times: int) -> Tensor:
    """[batch, heads · times, tokens, head]"""
    return heads[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2)


def attention(layer: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A layer's self_attn."""

    def turned(part: Tensor) -> Tensor:
        n_rot = cos.shape[-1]
        rotated, rest = part[..., :n_rot], part[..., n_rot:]
        first, second = rotated.chunk(2, -1)
        return torch.cat([rotated * cos + torch.cat([-second, first], -1) * sin, rest], -1)

    q, gate = layer.q_proj(x).unflatten(-1, (-1, 2 * layer.head_dim)).chunk(2, -1)
    k, v = (project(x).unflatten(-1, (-1, layer.head_dim)) for project in (layer.k_proj, layer.v_proj))
    q, k = turned(layer.q_norm(q).transpose(1, 2)), turned(layer.k_norm(k).transpose(1, 2))
    k, v = (repeated(part, layer.num_key_value_groups) for part in (k, v.transpose(1, 2)))
    read = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
    return layer.o_proj((read.transpose(1, 2) * gate.sigmoid()).flatten(2))


def logits(model: Any, ids: Tensor) -> Tensor:
    """[batch, tokens, vocabulary] of ids [batch, tokens], tokens a multiple of CHUNK."""
    inner = model.model
    table = inner.embed_tokens.weight
    x = table.index_select(0, ids.flatten()).view(*ids.shape, -1)
    angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * inner.rotary_emb.inv_freq
    cos, sin = (torch.cat([part, part], -1) for part in (angles.cos(), angles.sin()))
    for layer in inner.layers:
        read = layer.input_layernorm(x)
        if hasattr(layer, "self_attn"):
            x = x + attention(layer.self_attn, read, cos, sin)
        else:
            x = x + delta_net(layer.linear_attn, read)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return F.linear(inner.norm(x), table)
