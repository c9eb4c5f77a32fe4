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

from latentkv_convert.calibrate.block_error import product
from latentkv_convert.ir import F64, SIDES, Plan
from latentkv_convert.work import Work


@contextmanager
def compressed(model: Any, work: Work, plan: Plan) -> Iterator[Any]:
    """Replaces the projections of a transformers model in place; `rotated` keys at the call of attention,
    while the context lasts."""
    after = {}
    for index, layer in enumerate(plan.layers):
        for side in SIDES:
            chosen = layer.side(side)
            if chosen.path == "rotated" and work.spec.block.position == "rope":
                after[index] = torch.from_numpy(projector(work, index, chosen.ranks)).float()
            elif chosen.ranks:  # a bias of K adds the same to all scores of a query, projected or not
                replace(model, work, index, side, product(work, index, side, chosen.ranks))
    if not after:
        yield model
        return
    module = sys.modules[type(model).__module__]
    with patch.object(module, "apply_rotary_pos_emb", projecting(module.apply_rotary_pos_emb, after)):
        yield model


def replace(model: Any, work: Work, layer: int, side: str, new: np.ndarray) -> None:
    projection = work.spec.projections[side]
    weight = model.get_submodule(f"{work.spec.layers}.{layer}.{projection.module}").weight
    rows = slice(None) if projection.rows is None else torch.from_numpy(projection.rows)
    with torch.no_grad():
        weight[rows] = torch.from_numpy(new)


def projector(work: Work, layer: int, ranks: tuple[int, ...]) -> F64:
    """[w, w]: up·down of every group, for keys as rows."""
    full = np.zeros((work.spec.kv_width, work.spec.kv_width))
    begin = 0
    for basis, rank in zip(work.bases(layer, "k"), ranks, strict=True):
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
