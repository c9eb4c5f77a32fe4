"""Bases in which an error of the cache costs the answer the same along every axis."""

from __future__ import annotations

from ..compute import floats
from ..ir import F64, Basis
from ..rows.cached_rows import CachedRows
from .linalg import spectrum

FISHER_FLOOR = 1e-6  # of the largest eigenvalue: F^(-1/2) goes into factors stored in f16


def bases(cached: CachedRows, width: int, where: str, device: str) -> tuple[Basis, ...]:
    """One for every `width` channels of what a layer caches."""
    blocks = [slice(begin, begin + width) for begin in range(0, len(cached.moment), width)]
    return tuple(
        weighted(cached.moment[block, block], cached.fisher[block, block], where, device) for block in blocks
    )


def weighted(moment: F64, fisher: F64, where: str, device: str = "cpu") -> Basis:
    """down = R U Λ^(-1/4), up = Λ^(1/4) Uᵀ R⁻¹, with R = F^(1/2) and R M R = U Λ Uᵀ; sigma = Λ^(1/2).
    Where F is 0, as in a layer whose queries see no further than the exact recent tokens, R = 1: what is
    cached is never read there.

    Raises:
        ConvertError: a moment is not finite.
    """
    import torch

    rows, costs = (floats.tensor(each, device) for each in (moment, fisher))
    root, axes = spectrum(costs, where)
    if not root[0] > 0:
        root = torch.ones_like(root)
    root = root.clamp_min(FISHER_FLOOR**0.5 * float(root[0]))
    forward, backward = (axes * root) @ axes.T, (axes / root) @ axes.T
    sigma, directions = spectrum(forward @ rows @ forward, where)
    scale = sigma.clamp_min(1e-6 * float(sigma[0])).sqrt()
    down, up = forward @ directions / scale, scale[:, None] * (directions.T @ backward)
    return Basis(sigma.cpu().numpy(), down.cpu().numpy(), up.cpu().numpy())
