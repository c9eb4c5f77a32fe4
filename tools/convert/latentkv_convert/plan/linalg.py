"""Factorisations in float64: the eigenbasis of a second moment, and the ways to split it over two factors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..compute import floats
from ..errors import ConvertError
from ..ir import F64, Basis

if TYPE_CHECKING:
    from torch import Tensor

SIGMA_FLOOR = 1e-7  # of the largest: below it a singular value is rounding noise and must not be inverted
FISHER_FLOOR = 1e-6  # of the largest eigenvalue: F^(-1/2) goes into factors stored in f16
ROOT_FLOOR = 1e-4  # of the largest, for roots that are inverted into factors stored in f16


def eigenbasis(moment: F64, where: str) -> tuple[F64, F64]:
    """Singular values [n] (descending) and directions [n, n] (columns) of rows whose second moment is
    `moment`.

    For M = Wᵀ C W with C the input moment this is SVD-LLM's whitened SVD without its Cholesky factor:
    eigenvalues are the squared singular values, eigenvectors the output directions.
    """
    sigma, directions = spectrum(floats.tensor(moment), where)
    return sigma.numpy(), directions.numpy()


def spectrum(moment: Tensor, where: str) -> tuple[Tensor, Tensor]:
    """`eigenbasis` on the moment's own device."""
    import torch

    if not torch.isfinite(moment).all():
        raise ConvertError(where, "a finite second moment", "NaN or infinity")
    values, vectors = torch.linalg.eigh((moment + moment.T) / 2)
    return values.flip(0).clamp_min(0).sqrt(), vectors.flip(1)


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


def balanced(sigma: F64, directions: F64) -> Basis:
    """Half of sigma on each side (Palu's split): z has variance sigma_i, the scaling that loses least to a
    uniform quantizer after a Hadamard rotation."""
    root = np.sqrt(np.maximum(sigma, max(SIGMA_FLOOR * float(sigma[0]), np.finfo(np.float64).tiny)))
    return Basis(sigma, directions / root[None, :], root[:, None] * directions.T)


def tied(sigma: F64, directions: F64, cached: F64, read: F64) -> Basis:
    """One set of directions for what is cached and for what reads it (queries, or W_o), scaled per column.

    cached, read: second moments [n, n] of the two. With the spread of both sides equal, a uniform quantizer
    after a Hadamard rotation loses least: error ~ (sum var z)(sum var q'), minimised by Cauchy-Schwarz.
    """
    scales = []
    for moment in (cached, read):
        spread = np.sqrt(
            np.clip(np.einsum("ij,ik,kj->j", directions, moment, directions, optimize=True), 0.0, None)
        )
        scales.append(np.maximum(spread, max(ROOT_FLOOR * float(spread.max()), np.finfo(np.float64).tiny)))
    scale = np.sqrt(scales[1] / scales[0])
    return Basis(sigma, directions * scale[None, :], directions.T / scale[:, None])


def untied(cached: F64, read: F64, where: str) -> Basis:
    """The best rank-r scores for every r (KQ-SVD, arXiv 2512.05916): different projections of q and k.

    With L = M^(1/2) and L_q·L_k = U S Vᵀ: down = L_k⁻¹ V S^(1/2), up = S^(1/2) Uᵀ L_q⁻¹; the score error of
    rank r is the tail of S². Roots by eigendecomposition, small eigenvalues raised to a floor.
    """
    (key, key_inverse), (query, query_inverse) = (_root(moment, where) for moment in (cached, read))
    u, sigma, vt = np.linalg.svd(query @ key)
    half = np.sqrt(sigma)
    return Basis(sigma, key_inverse @ vt.T * half[None, :], half[:, None] * (u.T @ query_inverse))


def _root(moment: F64, where: str) -> tuple[F64, F64]:
    """M^(1/2) and its inverse."""
    sigma, directions = eigenbasis(moment, where)
    sigma = np.maximum(sigma, max(ROOT_FLOOR * float(sigma[0]), np.finfo(np.float64).tiny))
    return (directions * sigma[None, :]) @ directions.T, (directions / sigma[None, :]) @ directions.T
