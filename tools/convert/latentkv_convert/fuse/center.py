"""Rows stored about their mean: what is the same for every token leaves the cache and returns for nothing.

With mu the mean of a projection's output x on the calibration text and P = down·up, a truncated x is
mu + P(x - mu). In the file z = A h - downᵀ mu (attn_k_a.bias, attn_v_a.bias) or z = E (W h - mu)
(attn_k_e.bias, attn_v_e.bias), and mu joins the bias that is added to a rebuilt key, or once to a head's
output, as softmax rows sum to 1. Where keys meet queries as they are projected, a constant adds the same to
all scores of a query and the softmax removes it: nothing returns.

Data decides. The basis is then that of the centred second moment, which no longer keeps mu's own direction
exactly, and queries may look hard along it: with every tensor centred, a small OPT model at half rank has
18 % more divergence at f16, all of it from tensors whose mean is less than a quarter of their energy. Keys
with RoPE gain nothing: with means of up to nine tenths of their energy a small llama model's divergence
changes by +1 % at f16, -4 % at q4 and +1 % at q3, so they are left as published.
"""

from __future__ import annotations

import numpy as np

from ..ir import F32, F64, Basis
from ..work import Work

LEAST = 0.25  # |mu|² over E|x|²: f16 rows within 2 % of the uncentred ones, a seventh of the divergence at q4
LEAST_WITH_ROPE = 0.95  # of rebuilt keys


def share(work: Work, layer: int, side: str) -> float:
    """|mu|² over E|x|² on the calibration text; 0 for a method that measures no moments."""
    found = _moments(work, layer, side)
    if found is None:
        return 0.0
    moment, mu = found
    return float(mu @ mu / max(float(np.trace(moment)), np.finfo(np.float64).tiny))


def mean(work: Work, layer: int, side: str) -> F64 | None:
    """mu [w] of the projection's output without its bias, or None: rows are stored as they are."""
    least = LEAST_WITH_ROPE if side == "k" and work.spec.before_scores else LEAST
    if not work.center or share(work, layer, side) < least:
        return None
    found = _moments(work, layer, side)
    assert found is not None
    return found[1]


def centred(work: Work, layer: int, side: str, path: str) -> bool:
    """Whether the file stores a layer's K or V about its mean."""
    if path == "value":
        return False
    whole = path in ("full", "rotated")
    if whole and (side == "v" or work.spec.before_scores):
        return False
    return mean(work, layer, side) is not None


def covariance(work: Work, layer: int, side: str) -> F64:
    """[w, w] of what is cached, in the coordinates of x: E[x xᵀ], less mu muᵀ where rows are centred."""
    found = _moments(work, layer, side)
    assert found is not None
    mu = mean(work, layer, side)
    return found[0] if mu is None else found[0] - np.outer(mu, mu)


def key_covariance(work: Work, layer: int) -> F64:
    """[w, w] of keys as they meet the queries before RoPE, bias included (calibrate/heads.py)."""
    moment = np.asarray(work.stats["heads"][layer]["k"], dtype=np.float64)
    mu = None if work.spec.before_scores else mean(work, layer, "k")
    if mu is None:
        return moment
    bias = work.bias(layer, "k")
    whole = mu if bias is None else mu + bias
    return moment - np.outer(whole, whole)


def latent_mean(work: Work, layer: int, side: str, bases: tuple[Basis, ...]) -> F64 | None:
    """[Σr]: the mean of every group's latent, in the coordinates of `bases`."""
    mu = mean(work, layer, side)
    if mu is None:
        return None
    return np.concatenate([b.down.T @ part for b, part in zip(bases, np.split(mu, len(bases)), strict=True)])


def output_bias(work: Work, layer: int, side: str) -> F32 | None:
    """[w] after the up-projection: the projection's own bias, and mu."""
    bias, mu = work.bias(layer, side), mean(work, layer, side)
    if mu is None:
        return bias
    return (mu if bias is None else mu + bias).astype(np.float32)


def whole_bias(work: Work, layer: int, side: str) -> F32 | None:
    """[w] of a projection that is not cut; -mu takes the keys' own bias away too, which is as constant."""
    if not centred(work, layer, side, "full"):
        return work.bias(layer, side)
    mu = mean(work, layer, side)
    assert mu is not None
    return (-mu).astype(np.float32)


def _moments(work: Work, layer: int, side: str) -> tuple[F64, F64] | None:
    """E[x xᵀ] [w, w] and mu [w] from the statistic that the method measures."""
    for statistic, suffix in (("moments", ""), ("copies", "_moment")):
        if statistic in work.stats:
            stats = work.stats[statistic][layer]
            moment, mu = (stats[name] for name in (side + suffix, f"{side}_mean"))
            return np.asarray(moment, dtype=np.float64), np.asarray(mu, dtype=np.float64)
    return None
