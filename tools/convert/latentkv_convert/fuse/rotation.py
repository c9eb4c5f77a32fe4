"""A side's factors as they go into the file: cut to their ranks and rotated inside their segments.

Orthogonal matrices spread a latent's energy evenly over its channels, for any size:
Hadamard matrices from Sylvester's doubling and Paley's two constructions over prime fields; where none of
those exists, a random sign flip times the orthonormal DCT-II, which spreads nearly as well. Fused into the
factors, so size costs nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np

from ..ir import F64, SIDES, Basis, SidePlan
from ..work import Work
from . import energy


def finished(
    work: Work, plan: SidePlan, layer: int, side: str, bases: tuple[Basis, ...] | None = None
) -> tuple[Basis, ...]:
    """One Basis per group; without --rotate only cut. The rotation depends on seed, layer, side and group
    alone. What --polish has made of it comes first."""
    if bases is None and (layer, side) in work.polished:
        return work.polished[layer, side]
    result = []
    bases = bases or work.bases(layer, side, plan.group)
    is_turned = work.spec.mla is not None and side == "k"  # channels that stay as RoPE leaves them
    for group, (basis, rank) in enumerate(zip(bases, plan.ranks, strict=True)):
        cut = basis.truncated(rank)
        if work.rotate and not is_turned:
            rng = np.random.default_rng([work.seed, layer, SIDES.index(side), group])
            cut = fuse(cut, plan.segments[group], rng)
        if plan.one_scale:
            cut = evened(cut, plan.segments[group], work.rotate)
        if plan.regains and plan.formats is not None and not work.trains:  # exact tokens are latents then
            cut = energy.regained(cut, plan.segments[group], plan.formats[group])
        result.append(cut)
    return tuple(result)


def fuse(basis: Basis, widths: tuple[int, ...], rng: np.random.Generator) -> Basis:
    """Rotates a truncated basis inside each of its segments: down <- down·R, up <- Rᵀ·up (QuaRot's identity).

    A segment keeps its span, so dropping trailing segments stays a legal truncation.
    """
    import torch

    rotations = [rotation(width, rng) for width in widths]
    down, up = torch.tensor(basis.down), torch.tensor(basis.up)
    rows = None if basis.rows is None else torch.tensor(basis.rows)
    at = 0
    for channels, n in runs(widths):
        matrices = torch.from_numpy(np.stack(rotations[at : at + n]))
        at += n
        columns = down[:, channels].unflatten(1, (n, -1)).transpose(0, 1)
        down[:, channels] = (columns @ matrices).transpose(0, 1).flatten(1)
        for factor in (up, rows):
            if factor is not None:
                factor[channels] = (matrices.mT @ factor[channels].unflatten(0, (n, -1))).flatten(0, 1)
    return Basis(basis.sigma, down.numpy(), up.numpy(), None if rows is None else rows.numpy())


def evened(basis: Basis, widths: tuple[int, ...], is_rotated: bool) -> Basis:
    """Every channel divided by its spread, so that one scale serves a row. sigma has second moments before
    the rotation, which leaves all channels of a segment their mean."""
    moments = np.maximum(basis.sigma, 1e-6 * basis.sigma[0])
    if is_rotated:
        begins = np.cumsum((0, *widths[:-1]))
        moments = (np.add.reduceat(moments, begins) / widths).repeat(widths)
    spread = np.sqrt(moments)
    rows = None if basis.rows is None else basis.rows / spread[:, None]
    return Basis(basis.sigma, basis.down / spread, basis.up * spread[:, None], rows)


def runs(widths: Sequence[int]) -> Iterator[tuple[slice, int]]:
    """Runs of neighbouring segments that are equally wide: their channels, and how many segments they are."""
    begin = 0
    for width, same in itertools.groupby(widths):
        n_segments = len(list(same))
        yield slice(begin, begin + n_segments * width), n_segments
        begin += n_segments * width


def rotation(n: int, rng: np.random.Generator) -> F64:
    """[n, n] orthogonal: a randomly signed Hadamard matrix over sqrt(n), else a randomly signed DCT-II."""
    signs = rng.choice(np.array([-1.0, 1.0]), size=n)
    return signs[:, None] * spread(n)


@cache
def spread(n: int) -> F64:
    """[n, n] orthogonal: Hadamard's over sqrt(n), else the DCT-II."""
    base = hadamard(n)
    return dct(n) if base is None else base / np.sqrt(n)


@cache
def hadamard(n: int) -> F64 | None:
    """[n, n] of ±1 with H·Hᵀ = n·I, or None where Sylvester x Paley over prime fields has none."""
    if n in (1, 2):
        return np.array([[1.0]]) if n == 1 else np.array([[1.0, 1.0], [1.0, -1.0]])
    if n % 4:
        return None
    if _is_prime(n - 1):  # n - 1 = 3 mod 4 follows from n % 4 == 0
        return _paley_1(n - 1)
    if n % 4 == 0 and (n // 2 - 1) % 4 == 1 and _is_prime(n // 2 - 1):
        return _paley_2(n // 2 - 1)
    for left in _factors(n):
        a, b = hadamard(left), hadamard(n // left)
        if a is not None and b is not None:
            return np.asarray(np.kron(a, b), dtype=np.float64)
    return None


def dct(n: int) -> F64:
    """[n, n] orthonormal DCT-II."""
    rows, columns = np.arange(n)[:, None], np.arange(n)[None, :]
    matrix: F64 = np.cos(np.pi * (columns + 0.5) * rows / n) * np.sqrt(2.0 / n)
    matrix[0] /= np.sqrt(2.0)
    return matrix


def _jacobsthal(q: int) -> F64:
    """[q, q] quadratic characters of i - j modulo the prime q."""
    character = -np.ones(q)
    character[[x * x % q for x in range(1, q)]] = 1.0
    character[0] = 0.0
    index = np.arange(q)
    matrix: F64 = character[(index[:, None] - index[None, :]) % q]
    return matrix


def _paley_1(q: int) -> F64:
    """Order q + 1 for a prime q = 3 mod 4: I + S with S skew."""
    skew = np.zeros((q + 1, q + 1))
    skew[0, 1:], skew[1:, 0], skew[1:, 1:] = 1.0, -1.0, _jacobsthal(q)
    return skew + np.eye(q + 1)


def _paley_2(q: int) -> F64:
    """Order 2(q + 1) for a prime q = 1 mod 4: the symmetric conference matrix with 2x2 blocks in its
    entries."""
    conference = np.zeros((q + 1, q + 1))
    conference[0, 1:], conference[1:, 0], conference[1:, 1:] = 1.0, 1.0, _jacobsthal(q)
    on, diagonal = np.array([[1.0, 1.0], [1.0, -1.0]]), np.array([[1.0, -1.0], [-1.0, -1.0]])
    return np.kron(conference, on) + np.kron(np.eye(q + 1), diagonal)


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % factor for factor in range(2, int(n**0.5) + 1))


def _factors(n: int) -> list[int]:
    """Orders to split off, 2 first (doubling), then multiples of 4."""
    return [2, *[k for k in range(4, int(n**0.5) + 1, 4) if n % k == 0]]
