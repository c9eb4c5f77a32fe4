"""Moments after RoPE, averaged in closed form over every position of a served context.

A basis fitted on short windows has not seen the slow planes turn. With u = x_i + j x_(i+n/2) the complex
form of a plane, position n multiplies u by exp(j n theta); so the moments E[u ū'] and E[u u'] of two planes
are multiplied by the means of exp(j n (theta - theta')) and exp(j n (theta + theta')) over 0 <= n < context.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..ir import F32, F64


def after_rope(moment: F64, freqs: F64, head_dim: int, context: int) -> F64:
    """mean over n < context of R_n M R_nᵀ. moment: [heads·head_dim, heads·head_dim], transformers' row order.

    Head dimensions past 2·len(freqs) are not rotated: planes of frequency 0.
    """
    half, rest = len(freqs), head_dim - 2 * len(freqs)
    first = np.concatenate([np.arange(half), 2 * half + np.arange(rest // 2)])
    second = np.concatenate([half + np.arange(half), 2 * half + rest // 2 + np.arange(rest // 2)])
    heads = np.arange(moment.shape[0] // head_dim)[:, None] * head_dim
    a, b = (heads + first[None, :]).reshape(-1), (heads + second[None, :]).reshape(-1)
    theta = np.concatenate([freqs, np.zeros(rest // 2)])  # of a head's planes: all heads turn alike
    less, more = (
        np.tile(mean_turn(angle, context), (len(heads), len(heads)))
        for angle in (theta[:, None] - theta[None, :], theta[:, None] + theta[None, :])
    )
    aa, bb, ab, ba = (moment[np.ix_(*rows)] for rows in ((a, a), (b, b), (a, b), (b, a)))
    cross = (aa + bb + 1j * (ba - ab)) * less
    plain = (aa - bb + 1j * (ba + ab)) * more
    turned = np.empty_like(moment)
    turned[np.ix_(a, a)] = (cross + plain).real / 2
    turned[np.ix_(b, b)] = (cross - plain).real / 2
    turned[np.ix_(a, b)] = (plain - cross).imag / 2
    turned[np.ix_(b, a)] = (plain + cross).imag / 2
    return turned


def mean_turn(angle: F64, context: int) -> Any:
    """mean over n = 0 … context-1 of exp(j n angle), elementwise."""
    still = np.abs(np.sin(angle / 2)) < 1e-12  # whole turns: every term is 1
    step = np.where(still, 1.0, np.exp(1j * angle) - 1)
    return np.where(still, 1.0, (np.exp(1j * context * angle) - 1) / step / context)


def turned(rows: F32, freqs: F64, head_dim: int, positions: F64) -> F32:
    """Rows [n, heads·head_dim] after RoPE at positions [n], transformers' row order."""
    half = len(freqs)
    heads = rows.reshape(len(rows), -1, head_dim).astype(np.float64)
    u = heads[..., :half] + 1j * heads[..., half : 2 * half]
    u = u * np.exp(1j * positions[:, None, None] * freqs)
    return (
        np.concatenate([u.real, u.imag, heads[..., 2 * half :]], axis=-1)
        .reshape(rows.shape)
        .astype(np.float32)
    )
