"""Segments of a latent and what each costs in every row format: bytes per token, and nats of divergence."""

from __future__ import annotations

import numpy as np

from ..ir import F64, Basis, SidePlan
from ..rows import quantizer, sizes
from ..rows.cached_rows import CachedRows
from .kv_budget import Table

# A row is at most four runs that a kernel walks one by one. All of f16, q8, q6, q5 … q1 lose 7 % less on
# SmolLM2-135M at 14 % of f16 (KLD 0.0089, not 0.0096).
# g formats have no place here: rows are whole 4-byte words, so a segment of 32 or more has room for a minimum
# as well, and with it errors are smaller (4 bits 30 %, 2 bits 15 % on Gaussian segments of 32).
FORMATS = ("q8", "q4", "q2", "q1", "none")


def cut(rank: int, width: int) -> tuple[int, ...]:
    """Segments of `width` channels, the last one what is left."""
    return (width,) * (rank // width) + ((rank % width,) if rank % width else ())


def tables(cached: CachedRows, bases: tuple[Basis, ...], plan: SidePlan, head_dim: int) -> list[Table]:
    """One per group of `plan`, bytes of one slot; bases as they go into the file.

    Distortion in nats per token: ½ mean of importance · eᵀ G e over real rows, e the quantizer's error of one
    segment and G = up F upᵀ the Fisher moment in its coordinates. Importance: the row's gradient energy over
    the mean row's. Options are FORMATS.
    """
    found = []
    for index, basis in enumerate(bases):
        width = basis.down.shape[0]
        block = slice(index * width, (index + 1) * width)
        fisher = cached.fisher[block, block]
        weight = importance(cached, fisher, slice(index * plan.group, (index + 1) * plan.group), head_dim)
        latent = (cached.rows[:, block] @ basis.down).astype(np.float32)
        metric = basis.up @ fisher @ basis.up.T
        cost, distortion, begin = [], [], 0
        for n in plan.segments[index]:
            part = slice(begin, begin + n)
            begin += n
            exact = latent[:, part]
            errors = [(exact - quantizer.stored(exact, fmt)).astype(np.float64) for fmt in FORMATS]
            cost.append([sizes.segment_bytes(fmt, n) for fmt in FORMATS])
            distortion.append([_nats(error, metric[part, part], weight) for error in errors])
        kept = np.maximum(distortion, 0).astype(
            np.float32
        )  # as a master file holds them: the same plan there
        found.append(Table(np.array(cost), kept.astype(np.float64)))
    return found


def importance(cached: CachedRows, fisher: F64, heads: slice, head_dim: int) -> F64:
    """[n] gradient energy of the group's rows over the mean."""
    share = np.diagonal(fisher).reshape(-1, head_dim).sum(1)  # mean energy of each KV head
    weight = cached.energy[:, heads] @ share / share.sum()
    return np.asarray(weight / weight.mean(), dtype=np.float64)


def _nats(error: F64, metric: F64, weight: F64) -> float:
    return float(0.5 * np.mean(weight * np.einsum("ti,ti->t", error @ metric, error)))
