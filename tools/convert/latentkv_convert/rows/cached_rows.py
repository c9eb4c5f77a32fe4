"""What a layer's cache holds before it is compressed: moments, Fisher moments and real rows, from
calibrate/copies.py.

Which rows depends on the path: v and a k that is rebuilt or absorbed are kept as projected, without bias, or
about their mean (fuse/center.py); a rotated k after bias, norm and RoPE, whose moments are averaged over
every position of the served context (served.py).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from ..fuse import center
from ..ir import F32, F64, SIDES, Array
from ..source.frequencies import frequencies
from ..work import Work
from . import served

# Bases are better fitted to the tokens that are read: half of the moment is weighted by gradient energy. At
# 11 % of f16 this takes up to 9 % off the divergence of two 8-layer models; 0.9 is no better.
WEIGHTED_SHARE = 0.5
ONE_ROW = "value"  # the path of V whose rows keys are made of, too


@dataclass(frozen=True)
class CachedRows:
    moment: F64  # [w, w]
    fisher: F64  # [w, w]
    rows: F32  # [n, w]
    energy: F64  # [n, n_kv] squared gradient of a row per KV head, over its mean over rows

    @property
    def nbytes(self) -> int:
        return sum(int(getattr(self, each.name).nbytes) for each in fields(self))


def of(work: Work, layer: int, side: str, path: str, context: int | None) -> CachedRows:
    """context: the positions a rotated k is served at."""
    stats = work.stats["copies"][layer]
    name = "normed" if path == "rotated" and "normed_moment" in stats else side
    name = "one" if path == ONE_ROW else name
    found = _Measured(
        **{field.name: np.asarray(stats[f"{name}_{field.name}"]) for field in fields(_Measured)}
    )
    by = _offset(work, layer, side, path, name)
    if by is not None:
        found = found.shifted(by.astype(np.float64))
    if path == "rotated" and context is not None:
        freqs = frequencies(work.spec, context, layer)
        rng = np.random.default_rng([work.seed, layer, SIDES.index(side)])
        head_dim = work.spec.at(layer).of_side(side).head_dim
        found = found.after_rope(freqs, head_dim, context, rng, work.device)
    return found.cached()


@dataclass(frozen=True)
class _Measured:
    """The arrays of calibrate/copies.py for one kind of row."""

    moment: Array
    mean: Array
    weighted: Array
    weighted_mean: Array
    fisher: Array
    rows: Array
    energy: Array

    def shifted(self, by: F64) -> _Measured:
        """The arrays of rows x + by [w]."""
        return replace(
            self,
            moment=_shifted(self.moment, self.mean, by),
            weighted=_shifted(self.weighted, self.weighted_mean, by),
            rows=self.rows + by.astype(np.float32),
        )

    def after_rope(
        self, freqs: F64, head_dim: int, context: int, rng: np.random.Generator, device: str
    ) -> _Measured:
        """The arrays of rows after RoPE: moments over all positions, real rows at random ones."""
        names = ("moment", "weighted", "fisher")
        moments = {n: served.after_rope(getattr(self, n), freqs, head_dim, context, device) for n in names}
        at = rng.integers(0, context, len(self.rows)).astype(np.float64)
        rows = served.rows_after_rope(self.rows, freqs, head_dim, at, device)
        return replace(self, rows=rows, **moments)

    def cached(self) -> CachedRows:
        return CachedRows(
            WEIGHTED_SHARE * self.weighted + (1 - WEIGHTED_SHARE) * self.moment,
            np.asarray(self.fisher),
            np.asarray(self.rows),
            self.energy.astype(np.float64),
        )


def _offset(work: Work, layer: int, side: str, path: str, name: str) -> Array | None:
    """[w] from the projection's output without bias to what is cached."""
    if path == "rotated":
        return work.bias(layer, "k") if name == "k" else None
    mu = center.mean(work, layer, side)
    return None if mu is None else -mu


def _shifted(moment: F64, mean: F64, by: F64) -> F64:
    """E[(x + b)(x + b)ᵀ]"""
    return moment + np.outer(mean, by) + np.outer(by, mean) + np.outer(by, by)
