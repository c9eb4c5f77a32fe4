"""The compressed model in torch: W_k and W_v replaced by the products of their factors. No cache, no rows, no
rotation."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from latentkv_convert.ir import SIDES, Basis, Plan
from latentkv_convert.work import Work


def product(weight: np.ndarray, bases: tuple[Basis, ...], ranks: tuple[int, ...]) -> np.ndarray:
    """[w, d] that the factors of a layer's K or V stand for: every group's up·down of the original rows."""
    parts, begin = [], 0
    for basis, rank in zip(bases, ranks, strict=True):
        width = basis.down.shape[0]
        cut = basis.truncated(rank)
        parts.append(cut.up.T @ (cut.down.T @ weight[begin : begin + width].astype(np.float64)))
        begin += width
    return np.concatenate(parts)


def compress(model: Any, work: Work, plan: Plan) -> None:
    """Replaces the projections of a transformers model in place."""
    for index, layer in enumerate(plan.layers):
        for side in SIDES:
            if not layer.side(side).ranks:
                continue
            new = product(work.weight(index, side), work.bases(index, side), layer.side(side).ranks)
            name = f"{work.spec.layers}.{index}.{work.spec.projections[side].module}"
            with torch.no_grad():
                model.get_submodule(name).weight.copy_(torch.from_numpy(new))


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
