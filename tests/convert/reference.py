"""The compressed model in torch: W_k and W_v replaced by the products of their factors, and keys projected
after RoPE where the plan says so. No cache, no rows, no rotation."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from latentkv_convert.fuse import center
from latentkv_convert.ir import F32, F64, SIDES, Plan
from latentkv_convert.plan.block_error import product
from latentkv_convert.work import Work


@contextmanager
def compressed(model: Any, work: Work, plan: Plan) -> Iterator[Any]:
    """Replaces the projections of a transformers model in place; `rotated` keys at the call of attention,
    while the context lasts."""
    after = {}
    for index, layer in enumerate(plan.layers):
        for side in SIDES:
            chosen = layer.side(side)
            if chosen.path == "rotated" and work.spec.rope(index).base:
                after[index] = torch.from_numpy(as_stored(work, projector(work, index, chosen.ranks))).float()
            elif chosen.kept:  # a bias of K adds the same to all scores of a query, projected or not
                added = bias(work, index, side, chosen.kept)
                if side == "k" and work.spec.norms_whole(side):
                    cut_behind_norm(model, work, index, projector(work, index, chosen.kept), added)
                    continue
                replace(model, work, index, side, product(work, index, side, chosen.kept), added)
    if not after:
        yield model
        return
    module = sys.modules[type(model).__module__]
    with patch.object(module, "apply_rotary_pos_emb", projecting(module.apply_rotary_pos_emb, after)):
        yield model


def as_stored(work: Work, matrix: F64) -> F64:
    """Between keys in transformers' usual order of planes -> between those of this checkpoint."""
    rows = work.spec.projections["k"].rows
    if rows is None or work.spec.packed_qkv:
        return matrix
    stored = np.empty_like(matrix)
    stored[np.ix_(rows, rows)] = matrix
    return stored


def replace(
    model: Any, work: Work, layer: int, side: str, new: np.ndarray, bias: np.ndarray | None = None
) -> None:
    projection = work.spec.projections[side]
    module = model.get_submodule(f"{work.spec.layers}.{layer}.{projection.module}")
    rows = slice(None) if projection.rows is None else torch.from_numpy(projection.rows)
    with torch.no_grad():
        module.weight[rows] = torch.from_numpy(new)
        if bias is None or (module.bias is None and not bias.any()):
            return
        if module.bias is None:
            module.bias = torch.nn.Parameter(torch.zeros(module.weight.shape[0]))
        module.bias[rows] = torch.from_numpy(bias).float()


def cut_behind_norm(model: Any, work: Work, layer: int, matrix: F64, added: F32) -> None:
    """Keys that are normed over all their heads: the rows behind that norm times `matrix` [w, w]."""
    of = torch.from_numpy(matrix).float()
    norm = model.get_submodule(f"{work.spec.layers}.{layer}.self_attn.k_norm")
    norm.register_forward_hook(lambda module, inputs, output: output @ of + torch.from_numpy(added))


def mean(work: Work, layer: int, side: str) -> F64:
    """[w] that rows are centred by, 0 where they are not."""
    mu = center.mean(work, layer, side)
    return np.zeros(work.spec.kv_width) if mu is None else mu


def bias(work: Work, layer: int, side: str, ranks: tuple[int, ...]) -> F32:
    """[w]: of the projection, and the part of the mean that the factors cut."""
    own, mu = work.bias(layer, side), mean(work, layer, side)
    lost = mu - mu @ projector(work, layer, ranks, side)
    return np.asarray(lost if own is None else lost + own, dtype=np.float32)


def projector(work: Work, layer: int, ranks: tuple[int, ...], side: str = "k") -> F64:
    """[w, w]: up·down of every group, for keys or values as rows."""
    full = np.zeros((work.spec.kv_width, work.spec.kv_width))
    begin = 0
    for basis, rank in zip(work.bases(layer, side, work.spec.n_kv // len(ranks)), ranks, strict=True):
        cut, width = basis.truncated(rank), basis.down.shape[0]
        full[begin : begin + width, begin : begin + width] = cut.down @ cut.up
        begin += width
    return full


def projecting(stock: Callable[..., tuple[Tensor, Tensor]], after: dict[int, Tensor]) -> Callable[..., Any]:
    """RoPE, then keys times their layer's matrix: a forward pass calls it once per layer, in order.

    Falcon has repeated its KV heads by then.
    """
    order = itertools.cycle(after[index] for index in sorted(after))

    def apply(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        q, k = stock(q, k, *args, **kwargs)
        batch, heads, tokens, size = k.shape
        matrix = next(order)
        copies = heads * size // len(matrix)
        flat = k[:, ::copies].transpose(1, 2).reshape(batch, tokens, -1) @ matrix
        projected = flat.reshape(batch, tokens, -1, size).transpose(1, 2)
        return q, projected.repeat_interleave(copies, dim=1)

    return apply


def log_probabilities(model: Any, windows: np.ndarray) -> torch.Tensor:
    """[n, window, vocab] of the windows [n, window]."""
    with torch.no_grad():
        return torch.cat(
            [model(torch.from_numpy(w)[None], use_cache=False).logits.log_softmax(-1) for w in windows]
        )


def perplexity(log_p: torch.Tensor, windows: np.ndarray) -> float:
    """exp of the mean next-token negative log-likelihood."""
    targets = torch.from_numpy(windows)[:, 1:, None]
    return float(torch.exp(-log_p[:, :-1].gather(-1, targets).mean()))


def divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> float:
    """Mean KL divergence of q from p in nats per token."""
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


@contextmanager
def regional(model: Any, work: Work, plan: Plan, whole: np.ndarray) -> Iterator[Any]:
    """V of a token through its kept columns, unless `whole` [n_query, n_token] says that this query finds all
    of them; for transformers models whose eager attention is a function of their module."""
    kept = [
        torch.from_numpy(projector(work, index, layer.v.kept, "v")).float()
        for index, layer in enumerate(plan.layers)
    ]
    all_columns = torch.from_numpy(whole)
    module = sys.modules[type(model).__module__]
    stock = module.eager_attention_forward

    def attend(layer: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        batch, heads, tokens, size = value.shape
        bias = work.bias(layer.layer_idx, "v")  # added once, never cut, as is the mean
        offset = torch.from_numpy(mean(work, layer.layer_idx, "v")).float()
        offset = offset if bias is None else offset + torch.from_numpy(bias)
        flat = value.transpose(1, 2).reshape(batch, tokens, -1) - offset
        cut = (flat @ kept[layer.layer_idx] + offset).reshape(batch, tokens, heads, size).transpose(1, 2)
        out, weights = stock(layer, query, key, value, mask, **kwargs)
        repeated = (cut - value).repeat_interleave(layer.num_key_value_groups, dim=1)
        change = torch.where(all_columns, 0.0, weights) @ repeated
        return out + change.transpose(1, 2), weights

    with patch.object(module, "eager_attention_forward", attend):
        yield model
