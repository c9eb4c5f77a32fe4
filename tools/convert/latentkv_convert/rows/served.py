"""Moments after RoPE, averaged in closed form over every position of a served context.

A basis fitted on short windows has not seen the slow planes rotate. With u = x_i + j x_(i+n/2) the complex
form of a plane, position n multiplies u by exp(j n theta); so the moments E[u ū'] and E[u u'] of two planes
are multiplied by the means of exp(j n (theta - theta')) and exp(j n (theta + theta')) over 0 <= n < context.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ..compute import floats
from ..ir import F32, F64


def after_rope(moment: F64, freqs: F64, head_dim: int, context: int, device: str = "cpu") -> F64:
    """mean over n < context of R_n M R_nᵀ. moment: [heads·head_dim, heads·head_dim], transformers' row order.

    Head dimensions past 2·len(freqs) are not rotated: planes of frequency 0.
    """
    import torch

    half, rest = len(freqs), head_dim - 2 * len(freqs)
    first = np.concatenate([np.arange(half), 2 * half + np.arange(rest // 2)])
    second = np.concatenate([half + np.arange(half), 2 * half + rest // 2 + np.arange(rest // 2)])
    heads = np.arange(moment.shape[0] // head_dim)[:, None] * head_dim
    a, b = ((heads + part[None, :]).reshape(-1) for part in (first, second))
    theta = np.concatenate([freqs, np.zeros(rest // 2)])  # of a head's planes: all heads rotate alike
    less, more = (
        floats.tensor(mean_rotation(angle, context), device).tile(len(heads), len(heads))
        for angle in (theta[:, None] - theta[None, :], theta[:, None] + theta[None, :])
    )
    order = floats.tensor(np.concatenate([a, b]), device)
    planes = floats.tensor(moment, device)[order][:, order]
    n = len(a)
    aa, ab, ba, bb = planes[:n, :n], planes[:n, n:], planes[n:, :n], planes[n:, n:]
    cross = torch.complex(aa + bb, ba - ab) * less
    plain = torch.complex(aa - bb, ba + ab) * more
    upper = torch.cat([(cross + plain).real, (plain - cross).imag], dim=1)
    lower = torch.cat([(plain + cross).imag, (cross - plain).real], dim=1)
    back = order.argsort()
    result: F64 = (torch.cat([upper, lower]) / 2)[back][:, back].cpu().numpy()
    return result


def mean_rotation(angle: F64, context: int) -> Any:
    """mean over n = 0 … context-1 of exp(j n angle), elementwise."""
    still = np.abs(np.sin(angle / 2)) < 1e-12  # whole turns: every term is 1
    step = np.where(still, 1.0, np.exp(1j * angle) - 1)
    return np.where(still, 1.0, (np.exp(1j * context * angle) - 1) / step / context)


def rows_after_rope(rows: F32, freqs: F64, head_dim: int, positions: F64, device: str = "cpu") -> F32:
    """Rows [n, heads·head_dim] after RoPE at positions [n], transformers' row order."""
    import torch

    moved, half = partial(floats.tensor, device=device), len(freqs)
    heads = moved(rows).double().unflatten(1, (-1, head_dim))
    angle = moved(positions)[:, None, None] * moved(freqs)
    u = torch.complex(heads[..., :half], heads[..., half : 2 * half]) * torch.polar(
        torch.ones_like(angle), angle
    )
    whole = torch.cat([u.real, u.imag, heads[..., 2 * half :]], dim=-1)
    result: F32 = whole.flatten(1).float().cpu().numpy()
    return result
