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


def perplexity(model: Any, windows: np.ndarray) -> float:
    """exp of the mean next-token negative log-likelihood over windows [n, window]."""
    total = 0.0
    with torch.no_grad():
        for window in windows:
            tokens = torch.from_numpy(window)[None]
            logits = model(tokens, use_cache=False).logits[0, :-1]
            total += float(torch.nn.functional.cross_entropy(logits, tokens[0, 1:]))
    return float(np.exp(total / len(windows)))
