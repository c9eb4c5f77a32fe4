"""Coefficients of features from measured times: non-negative least squares of relative errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...ir import F64
from .features import UNITS

LEAST_US = 1.0  # below it errors count in microseconds: so small a difference of two steps is mostly noise
# A share of each column's norm. Counts that the points cannot tell apart share what they cost; without it
# one of them takes all, and a plan that has more of another seems free.
RIDGE = 0.03


@dataclass(frozen=True)
class Fit:
    coefficients: Mapping[str, float]  # of the features that some point has
    worst: float  # relative error over the points
    median: float


def fit(points: Sequence[tuple[Mapping[str, float], float]]) -> Fit:
    """points: (counts of a layer at a depth, microseconds). Features that no point has get no coefficient."""
    names = [name for name in UNITS if any(counts.get(name) for counts, _ in points)]
    us = np.array([time for _, time in points])
    counts = np.array([[counts.get(name, 0.0) for name in names] for counts, _ in points])
    weight = 1 / np.maximum(us, LEAST_US)
    rows = counts * weight[:, None]
    norms = np.linalg.norm(rows, axis=0)
    design = np.concatenate([rows / norms, RIDGE * np.eye(len(names))])
    scaled = nnls(design, np.concatenate([us * weight, np.zeros(len(names))]))
    errors = np.abs(rows @ (scaled / norms) - us * weight)
    found = dict(zip(names, map(float, scaled / norms), strict=True))
    return Fit(found, float(errors.max()), float(np.median(errors)))


def nnls(a: F64, b: F64) -> F64:
    """argmin over x >= 0 of |a x - b|². Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23:
    a [m, n] of full column rank, b [m] -> x [n]."""
    n = a.shape[1]
    x, free = np.zeros(n), np.zeros(n, dtype=bool)
    tolerance = 1e-12 * float(np.abs(a.T @ b).max(initial=0.0))
    for _ in range(10 * n):
        gradient = np.where(free, -np.inf, a.T @ (b - a @ x))
        if free.all() or gradient.max() <= tolerance:
            break
        free[int(gradient.argmax())] = True
        while True:
            trial = np.zeros(n)
            trial[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            below = free & (trial <= 0)
            if not below.any():
                break
            step = float((x[below] / (x[below] - trial[below])).min())
            x = x + step * (trial - x)
            free &= x > 1e-15
        x = trial
    return x
