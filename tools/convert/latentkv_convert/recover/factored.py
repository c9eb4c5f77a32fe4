"""A decoder whose K and V projections are the factors of a plan: A, then an up-projection per group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..calibrate.decoder import Decoder
from ..fuse import center
from ..ir import F64, SIDES, Basis, Plan
from ..work import Work

Trained = Mapping[tuple[int, str], tuple[Basis, ...]]  # (layer, side) -> a Basis with its own A per group


class Factors(nn.Module):
    """One side of one layer: latent_a x [..., Σr], split over the groups, each through its own latent_b, plus
    the mean where rows are centred and the projection's own bias."""

    def __init__(self, work: Work, layer: int, side: str, ranks: tuple[int, ...]) -> None:
        super().__init__()
        weight = work.weight(layer, side).astype(np.float64)
        self.ranks = ranks
        bases = work.bases(layer, side, work.spec.at(layer).n_kv // len(ranks))
        self.bases = [basis.truncated(rank) for basis, rank in zip(bases, ranks, strict=True)]
        width = self.bases[0].down.shape[0]
        rows = [basis.down.T @ weight[i * width : (i + 1) * width] for i, basis in enumerate(self.bases)]
        mean, mu = center.latent_mean(work, layer, side, tuple(self.bases)), center.mean(work, layer, side)
        self.latent_a = linear(np.concatenate(rows), None if mean is None else -mean)
        self.mean: Tensor | None
        self.register_buffer("mean", None if mu is None else torch.from_numpy(mu.copy()).float())
        bias = work.bias(layer, side)
        self.bias: Tensor | None
        self.register_buffer("bias", None if bias is None else torch.from_numpy(bias))
        self.latent_b = nn.ModuleList(linear(basis.up.T) for basis in self.bases)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.latent_a(x).split(self.ranks, dim=-1)
        y = torch.cat([up(part) for up, part in zip(self.latent_b, parts, strict=True)], dim=-1)
        for constant in (self.mean, self.bias):
            y = y if constant is None else y + constant
        return y

    def trained(self) -> tuple[Basis, ...]:
        a = numpy(self.latent_a).T  # [n_embd, Σr]
        parts = np.split(a, np.cumsum(self.ranks)[:-1], axis=1)
        ups = [numpy(up).T for up in self.latent_b]
        return tuple(
            replace(basis, up=up, rows=part.T) for basis, up, part in zip(self.bases, ups, parts, strict=True)
        )


def install(model: Decoder, work: Work, plan: Plan) -> dict[tuple[int, str], Factors]:
    """Replaces the projections of a model in place, where a layer has a latent."""
    installed: dict[tuple[int, str], Factors] = {}
    for index, layer in enumerate(plan.layers):
        for side in SIDES:
            if not layer.side(side).ranks:
                continue
            factors = Factors(work, index, side, layer.side(side).ranks)
            setattr(model.layers[index], f"attn_{side}", factors)
            installed[index, side] = factors
    return installed


def linear(weight: F64, bias: F64 | None = None) -> nn.Linear:
    """A frozen Linear, f32, from [out, in]."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(torch.from_numpy(np.ascontiguousarray(weight)).float(), requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(torch.from_numpy(bias).float(), requires_grad=False)
    return made


def numpy(module: Any) -> F64:
    weight: Tensor = module.weight
    return weight.detach().cpu().double().numpy()
