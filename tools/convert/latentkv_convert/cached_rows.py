"""What a layer's cache holds before it is compressed: moments, Fisher moments and real rows, from
calibrate/copies.py.

Which rows depends on the path: v and a k that is rebuilt or absorbed are kept as projected, without bias, or
about their mean (fuse/center.py); a rotated k after bias, norm and RoPE, which turns its moments over every
position of the served context (served.py).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from . import served
from .fuse import center
from .ir import F32, F64, SIDES, Array
from .work import Work

# Bases are better fitted to the tokens that are read: half of the moment is weighted by gradient energy. At
# 11 % of f16 this takes up to 9 % off the divergence of two 8-layer models; 0.9 is no better.
WEIGHTED_SHARE = 0.5


@dataclass(frozen=True)
class Reads:
    """Of the rows as every query reads them, those inside the recent window too."""

    moment: F64  # [w, w] E[x xᵀ] over tokens past the sinks, weighted by |g|²
    fisher: F64  # [w, w] E[g gᵀ]
    sink_rows: F64  # [n, w] the sinks themselves
    sink_slopes: F64  # [n, w] scaled, so that ½ mean (g e)² is nats per token


@dataclass(frozen=True)
class CachedRows:
    moment: F64  # [w, w]
    fisher: F64  # [w, w]
    rows: F32  # [n, w]
    energy: F64  # [n, n_kv] squared gradient of a row per KV head, over its mean over rows
    reads: Reads


def of(work: Work, layer: int, side: str, path: str, context: int | None) -> CachedRows:
    """context: the positions a rotated k is served at."""
    assert work.sample is not None
    stats = work.stats["copies"][layer]
    name = "normed" if path == "rotated" and "normed_moment" in stats else side
    found = _Measured(
        **{field.name: np.asarray(stats[f"{name}_{field.name}"]) for field in fields(_Measured)}
    )
    by = _offset(work, layer, side, path, name)
    if by is not None:
        found = found.shifted(by.astype(np.float64))
    if path == "rotated" and context is not None:
        freqs = served.frequencies(work.checkpoint.config, work.spec, context)
        rng = np.random.default_rng([work.seed, layer, SIDES.index(side)])
        found = found.turned(freqs, work.spec.head_dim, context, rng)
    return found.cached(int(work.sample.tokens.shape[1]))


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
    reads_weighted: Array
    reads_weighted_mean: Array
    reads_fisher: Array
    sink_rows: Array
    sink_slopes: Array

    def shifted(self, by: F64) -> _Measured:
        """Of rows x + by [w]."""
        return replace(
            self,
            moment=_shifted(self.moment, self.mean, by),
            weighted=_shifted(self.weighted, self.weighted_mean, by),
            reads_weighted=_shifted(self.reads_weighted, self.reads_weighted_mean, by),
            rows=self.rows + by.astype(np.float32),
            sink_rows=self.sink_rows + by.astype(np.float32),
        )

    def turned(self, freqs: F64, head_dim: int, context: int, rng: np.random.Generator) -> _Measured:
        """Of rows after RoPE: moments over all positions, real rows at random ones, sinks at their own."""
        names = ("moment", "weighted", "fisher", "reads_weighted", "reads_fisher")
        moments = {n: served.after_rope(getattr(self, n), freqs, head_dim, context) for n in names}
        at = rng.integers(0, context, len(self.rows)).astype(np.float64)
        n_windows, n_sink, width = self.sink_rows.shape
        own = np.tile(np.arange(n_sink, dtype=np.float64), n_windows)
        sinks = {
            name: served.turned(getattr(self, name).reshape(-1, width), freqs, head_dim, own).reshape(
                n_windows, n_sink, width
            )
            for name in ("sink_rows", "sink_slopes")
        }
        return replace(self, rows=served.turned(self.rows, freqs, head_dim, at), **moments, **sinks)

    def cached(self, window: int) -> CachedRows:
        """window: tokens of one, of which the sinks are a part."""
        n_sink, width = self.sink_rows.shape[1:]
        sinks, slopes = (x.reshape(-1, width).astype(np.float64) for x in (self.sink_rows, self.sink_slopes))
        return CachedRows(
            WEIGHTED_SHARE * self.weighted + (1 - WEIGHTED_SHARE) * self.moment,
            np.asarray(self.fisher),
            np.asarray(self.rows),
            self.energy.astype(np.float64),
            Reads(
                self.reads_weighted, self.reads_fisher, sinks, slopes * np.sqrt(n_sink / (window - n_sink))
            ),
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
