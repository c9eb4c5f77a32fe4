"""Segments of a latent and what each costs in every row format: bytes per token, and nats of divergence."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ..compute import floats
from ..fuse.rotation import runs
from ..ir import F64, Basis, SidePlan
from ..rows import sizes
from ..rows.cached_rows import CachedRows
from .kv_budget import Table

if TYPE_CHECKING:
    from torch import Tensor

# A row is at most four runs that a kernel walks one by one. All of f16, q8, q6, q5 … q1 lose 7 % less on
# SmolLM2-135M at 14 % of f16 (KLD 0.0089, not 0.0096).
# g formats have no place here: rows are whole 4-byte words, so a segment of 32 or more has room for a minimum
# as well, and with it errors are smaller (4 bits 30 %, 2 bits 15 % on Gaussian segments of 32).
FORMATS = ("q8", "q4", "q2", "q1", "none")


def cut(rank: int, width: int) -> tuple[int, ...]:
    """Segments of `width` channels, the last one what is left."""
    return (width,) * (rank // width) + ((rank % width,) if rank % width else ())


def tables(
    cached: CachedRows, bases: tuple[Basis, ...], plan: SidePlan, head_dim: int, device: str
) -> list[Table]:
    """One per group of `plan`, bytes of one slot; bases as they go into the file.

    Distortion in nats per token: ½ mean of importance · eᵀ G e over real rows, e the quantizer's error of one
    segment and G = up F upᵀ the Fisher moment in its coordinates. Importance: the row's gradient energy over
    the mean row's. Options are FORMATS.
    """
    import torch

    moved = partial(floats.tensor, device=device)
    found = []
    for index, basis in enumerate(bases):
        width = basis.down.shape[0]
        block = slice(index * width, (index + 1) * width)
        fisher = cached.fisher[block, block]
        heads = slice(index * plan.group, (index + 1) * plan.group)
        weight = moved(importance(cached, fisher, heads, head_dim))
        latent = (moved(cached.rows[:, block]).double() @ moved(basis.down)).float()
        up = moved(basis.up)
        metric = up @ moved(fisher) @ up.T
        widths = plan.segments[index]
        distortion = torch.cat(
            [
                _nats(latent[:, part], metric[part, part], weight, n_segments)
                for part, n_segments in runs(widths)
            ]
        )
        # as a master file holds them: the same plan there
        kept = distortion.clamp_min(0).float().double().cpu().numpy()
        cost = np.array([[sizes.segment_bytes(fmt, n) for fmt in FORMATS] for n in widths])
        found.append(Table(cost, kept))
    return found


def importance(cached: CachedRows, fisher: F64, heads: slice, head_dim: int) -> F64:
    """[n] gradient energy of the group's rows over the mean; ones where no query reads them."""
    share = np.diagonal(fisher).reshape(-1, head_dim).sum(1)  # mean energy of each KV head
    if not share.any():
        return np.ones(len(cached.energy))
    weight = cached.energy[:, heads] @ share / share.sum()
    return np.asarray(weight / weight.mean(), dtype=np.float64)


def _nats(latent: Tensor, metric: Tensor, weight: Tensor, n_segments: int) -> Tensor:
    """[segments, FORMATS] f64 of latent [n, segments · width], metric of both sides' channels."""
    import torch

    from ..rows import quantizer

    exact = latent.unflatten(1, (n_segments, -1)).transpose(0, 1).contiguous()
    width = exact.shape[-1]
    blocks = metric.unflatten(0, (n_segments, width)).unflatten(2, (n_segments, width))
    own = blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1).float()  # [segments, width, width]
    columns = []
    for fmt in FORMATS:
        error = exact - quantizer.stored(exact, fmt)
        columns.append(0.5 * ((error @ own).mul_(error).sum(-1).double() @ weight) / len(weight))
    return torch.stack(columns, dim=1)
