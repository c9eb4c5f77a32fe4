"""A transformers model whose K and V projections are the factors of a plan: A, then an up-projection per
group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..ir import F64, SIDES, Basis, Plan, Projection
from ..plan.work import Work
from ..write.fuse import center

Trained = Mapping[tuple[int, str], tuple[Basis, ...]]  # (layer, side) -> a Basis with its own A per group


class Factors(nn.Module):
    """One side of one layer: latent_a x [..., Σr], split over the groups, each through its own latent_b, plus
    the mean where rows are centred."""

    def __init__(self, work: Work, layer: int, side: str, ranks: tuple[int, ...]) -> None:
        super().__init__()
        weight = work.weight(layer, side).astype(np.float64)
        self.ranks = ranks
        self.bases = [basis.truncated(r) for basis, r in zip(work.bases(layer, side), ranks, strict=True)]
        width = self.bases[0].down.shape[0]
        rows = [basis.down.T @ weight[i * width : (i + 1) * width] for i, basis in enumerate(self.bases)]
        mean, mu = center.latent_mean(work, layer, side, tuple(self.bases)), center.mean(work, layer, side)
        self.latent_a = linear(np.concatenate(rows), None if mean is None else -mean)
        self.mean: Tensor | None
        self.register_buffer("mean", None if mu is None else torch.from_numpy(mu).float())
        self.latent_b = nn.ModuleList(linear(basis.up.T) for basis in self.bases)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.latent_a(x).split(self.ranks, dim=-1)
        y = torch.cat([up(part) for up, part in zip(self.latent_b, parts, strict=True)], dim=-1)
        return y if self.mean is None else y + self.mean

    def trained(self) -> tuple[Basis, ...]:
        a = numpy(self.latent_a).T  # [n_embd, Σr]
        parts = np.split(a, np.cumsum(self.ranks)[:-1], axis=1)
        ups = [numpy(up).T for up in self.latent_b]
        return tuple(
            replace(basis, up=up, rows=part.T) for basis, up, part in zip(self.bases, ups, parts, strict=True)
        )


class Projections(nn.Module):
    """Stands for a Linear that makes K, V or all of q, k and v: some of its rows factored, the rest as they
    were."""

    def __init__(self, linear_: Any, sides: Mapping[str, tuple[Projection, Factors]]) -> None:
        super().__init__()
        weight, bias = linear_.weight.detach(), linear_.bias
        every = np.arange(weight.shape[0])
        taken = [every if p.rows is None else p.rows for p, _ in sides.values()]
        rest = np.setdiff1d(every, np.concatenate(taken))
        self.rest = linear(weight[torch.from_numpy(rest)].double().numpy()) if rest.size else None
        self.sides = nn.ModuleDict({side: factors for side, (_, factors) in sides.items()})
        self.order: Tensor
        self.bias: Tensor | None
        self.register_buffer("order", torch.from_numpy(np.argsort(np.concatenate([rest, *taken]))))
        self.register_buffer("bias", None if bias is None else bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        parts = [] if self.rest is None else [self.rest(x)]
        y = torch.cat([*parts, *(factors(x) for factors in self.sides.values())], dim=-1)[..., self.order]
        return y if self.bias is None else y + self.bias


def install(model: Any, work: Work, plan: Plan) -> dict[tuple[int, str], Factors]:
    """Replaces the projections of a transformers model in place, where a layer has a latent."""
    installed: dict[tuple[int, str], Factors] = {}
    for index, layer in enumerate(plan.layers):
        modules: dict[str, dict[str, tuple[Projection, Factors]]] = {}
        for side in SIDES:
            if not layer.side(side).ranks:
                continue
            projection = work.spec.projections[side]
            factors = Factors(work, index, side, layer.side(side).ranks)
            modules.setdefault(projection.module, {})[side] = (projection, factors)
            installed[index, side] = factors
        for name, sides in modules.items():
            owner, _, leaf = f"{work.spec.layers}.{index}.{name}".rpartition(".")
            parent = model.get_submodule(owner)
            setattr(parent, leaf, Projections(getattr(parent, leaf), sides))
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
