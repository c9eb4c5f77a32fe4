"""Attention with what torch's own has not: sinks, of each query head a logit that takes part in the softmax
and has no value; and a soft cap, c: scores become c · tanh(scores / c)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

_BLOCK = 256  # queries at once


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    softcap: float,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """query [n, n_head, T, head_dim], key and value [n, n_kv, T, head_dim], sinks [n_head], attn_mask bool
    [1, 1, T, T], softcap 0: none -> [n, n_head, T, head_dim]. Like scaled_dot_product_attention, modes may
    take its place."""
    if has_torch_function((query, key, value)):
        of = (query, key, value)
        taken: Any = handle_torch_function(attention, of, *of, sinks, softcap, attn_mask, is_causal, scale)
        return taken  # type: ignore[no-any-return]
    repeats, n = query.shape[1] // key.shape[1], key.shape[2]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    own_sinks = None if sinks is None else sinks[None, :, None, None]
    parts = []
    for begin in range(0, query.shape[2], _BLOCK):
        rows = slice(begin, begin + _BLOCK)
        scores = capped(query[:, :, rows] @ key.mT * scale, softcap)
        if is_causal:
            later = torch.ones(scores.shape[-2], n, dtype=torch.bool, device=query.device).triu(begin + 1)
            scores = scores.masked_fill(later, float("-inf"))
        elif attn_mask is not None:
            scores = scores.masked_fill(~attn_mask[:, :, rows], float("-inf"))
        parts.append(softmax(scores, own_sinks) @ value)
    return torch.cat(parts, dim=2)


def capped(scores: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Over the last dimension, and over sinks, of the scores' shape but for that dimension."""
    if sinks is None:
        return scores.softmax(-1)
    return torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1).softmax(-1)[..., :-1]
