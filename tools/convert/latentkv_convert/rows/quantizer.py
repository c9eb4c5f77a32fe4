"""The cache's row formats as NumPy sees them, to measure what a plan costs
(native/src/cache/formats/{affine,fit}.h)."""

from __future__ import annotations

import numpy as np

from ..ir import F32

# Optimal step of a uniform quantizer with 2^b levels for a Gaussian of standard deviation 1 (Max 1960).
GAUSSIAN_STEP = {1: 1.5958, 2: 0.9957, 3: 0.5860, 4: 0.3352}
MAX_FITTED_BITS = 4
_N_REFINE = 3
_F16_MAX = 65504.0


def stored(x: F32, fmt: str) -> F32:
    """What a cache returns for rows x [n, width] of one segment in format f16, q8 … q1 or none.

    qB: code · scale + minimum. Both are of least squared error up to 4 bits; above, or where the minimum
    dwarfs the step, they span the row.
    """
    if fmt == "none":
        return np.zeros_like(x)
    if fmt == "f16":
        return _half(x)
    n_steps = np.float32(2 ** int(fmt[1:]) - 1)
    minimum = _rounded(x.min(axis=1), down=True)
    scale = _rounded(np.maximum(x.max(axis=1) - minimum, 0) / n_steps, down=False)
    if int(fmt[1:]) <= MAX_FITTED_BITS:
        step, centre = fitted(x, int(fmt[1:]))
        low = centre - n_steps / 2 * step
        fits = (np.abs(low) < 64 * step) & (step > 1e-6)
        minimum, scale = np.where(fits, _half(low), minimum), np.where(fits, _half(step), scale)
    code = _codes(x - minimum[:, None], scale, n_steps)
    return code * scale[:, None] + minimum[:, None]


def fitted(x: F32, bits: int) -> tuple[F32, F32]:
    """Scale and centre [n] of least squared error for levels −z … z, z = (2^bits − 1) / 2.

    Levels and parameters alternate three times from each of two starts: what spans the row, and the optimal
    step for a Gaussian.
    """
    n, n_steps = np.float32(x.shape[1]), np.float32(2**bits - 1)
    z = n_steps / 2
    middle = (x.min(axis=1) + x.max(axis=1)) / 2
    mean = x.mean(axis=1)
    widest = (x.max(axis=1) - middle) / z
    spread = np.sqrt(np.square(x - mean[:, None]).mean(axis=1)) * np.float32(GAUSSIAN_STEP[bits])
    best, best_centre, best_gain = widest, middle, np.full(len(x), -1.0, dtype=np.float32)
    for scale, centre in ((widest, middle), (spread, mean)):
        for _ in range(_N_REFINE):
            y = x - centre[:, None]
            level = _codes(y + (z * scale)[:, None], scale, n_steps) - z
            y_sum, l_sum = y.sum(axis=1), level.sum(axis=1)
            xl = np.einsum("ij,ij->i", y, level) - l_sum * y_sum / n
            ll = np.einsum("ij,ij->i", level, level) - l_sum * l_sum / n
            good = (xl > 0) & (ll > 0)
            scale = np.where(good, xl / np.where(good, ll, 1), scale)
            centre = np.where(good, centre + (y_sum - scale * l_sum) / n, centre)
            better = good & (xl * scale > best_gain) & (widest > 1e-12)
            best, best_centre = np.where(better, scale, best), np.where(better, centre, best_centre)
            best_gain = np.where(better, xl * scale, best_gain)
    return best, best_centre


def _codes(x: F32, scale: F32, n_steps: np.float32) -> F32:
    """0 … n_steps: x over scale, to the nearest."""
    inverse = np.divide(1.0, scale, out=np.zeros_like(scale), where=scale > 0)
    return np.trunc(np.clip(x * inverse[:, None] + np.float32(0.5), 0, n_steps))


def _half(x: F32) -> F32:
    return np.clip(x, -_F16_MAX, _F16_MAX).astype(np.float16).astype(np.float32)


def _rounded(x: F32, down: bool) -> F32:
    """To f16, all one way."""
    nearest = _half(x).astype(np.float16)
    beyond = nearest > x if down else nearest < x
    away = np.nextafter(nearest, np.float16(-np.inf if down else np.inf))
    return np.where(beyond, away, nearest).astype(np.float32)
