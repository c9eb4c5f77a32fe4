"""Factorisations in float64: the eigenbasis of a second moment and the balanced split of it."""

from __future__ import annotations

import numpy as np

from .errors import ConvertError
from .ir import F64, Basis

SIGMA_FLOOR = 1e-7  # of the largest: below it a singular value is rounding noise and must not be inverted


def eigenbasis(moment: F64, where: str) -> tuple[F64, F64]:
    """Singular values [n] (descending) and directions [n, n] (columns) of rows whose second moment is
    `moment`.

    For M = Wᵀ C W with C the input moment this is SVD-LLM's whitened SVD without its Cholesky factor:
    eigenvalues are the squared singular values, eigenvectors the output directions.
    """
    if not np.isfinite(moment).all():
        raise ConvertError(where, "a finite second moment", "NaN or infinity")
    values, vectors = np.linalg.eigh((moment + moment.T) / 2)
    sigma = np.sqrt(np.clip(values[::-1], 0.0, None))
    return sigma, np.ascontiguousarray(vectors[:, ::-1])


def balanced(sigma: F64, directions: F64) -> Basis:
    """Half of sigma on each side (Palu's split): z has variance sigma_i, the scaling that loses least to a
    uniform quantizer after a Hadamard rotation."""
    root = np.sqrt(np.maximum(sigma, max(SIGMA_FLOOR * float(sigma[0]), np.finfo(np.float64).tiny)))
    return Basis(sigma, directions / root[None, :], root[:, None] * directions.T)
