"""What a layer's cache holds before it is compressed: moments, Fisher moments and real rows, from
calibrate/copies.py.

Which rows depends on the path: v and a k that is rebuilt or absorbed are kept as projected, without bias, or
about their mean (fuse/center.py); a rotated k after bias, norm and RoPE, which turns its moments over every
position of the served context (served.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import served
from .fuse import center
from .ir import F32, F64, SIDES, Array
from .work import Work

# Bases are better fitted to the tokens that are read: half of the moment is weighted by gradient energy. At
# 11 % of f16 this takes up to 9 % off the divergence of two 8-layer models; 0.9 is no better.
WEIGHTED_SHARE = 0.5


@dataclass(frozen=True)
class CachedRows:
    moment: F64  # [w, w]
    fisher: F64  # [w, w]
    rows: F32  # [n, w]
    energy: F64  # [n, n_kv] squared gradient of a row per KV head, over its mean over rows


def of(work: Work, layer: int, side: str, path: str, context: int | None) -> CachedRows:
    """context: the positions a rotated k is served at."""
    stats = work.stats["copies"][layer]
    name = "normed" if path == "rotated" and "normed_moment" in stats else side

    def array(key: str) -> Array:
        return np.asarray(stats[f"{name}_{key}"])

    moment, weighted, fisher, rows = (array(key) for key in ("moment", "weighted", "fisher", "rows"))
    by = _offset(work, layer, side, path, name)
    if by is not None:
        moment = _shifted(moment, array("mean"), by.astype(np.float64))
        weighted = _shifted(weighted, array("weighted_mean"), by.astype(np.float64))
        rows = rows + by.astype(np.float32)
    moment = WEIGHTED_SHARE * weighted + (1 - WEIGHTED_SHARE) * moment
    if path == "rotated" and context is not None:
        head_dim = work.spec.head_dim
        freqs = served.frequencies(work.checkpoint.config, work.spec, context)
        moment, fisher = (served.after_rope(each, freqs, head_dim, context) for each in (moment, fisher))
        rng = np.random.default_rng([work.seed, layer, SIDES.index(side)])
        rows = served.turned(rows, freqs, head_dim, rng.integers(0, context, len(rows)).astype(np.float64))
    return CachedRows(moment, fisher, rows, array("energy").astype(np.float64))


def _offset(work: Work, layer: int, side: str, path: str, name: str) -> Array | None:
    """[w] from the projection's output without bias to what is cached."""
    if path == "rotated":
        return work.bias(layer, "k") if name == "k" else None
    mu = center.mean(work, layer, side)
    return None if mu is None else -mu


def _shifted(moment: F64, mean: F64, by: F64) -> F64:
    """E[(x + b)(x + b)ᵀ]"""
    return moment + np.outer(mean, by) + np.outer(by, mean) + np.outer(by, by)
