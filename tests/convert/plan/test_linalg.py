"""The identities the factorisations rest on (whitening = output PCA, balanced split, rotations)."""

from __future__ import annotations

import numpy as np
import pytest

from latentkv_convert.fuse import rotation
from latentkv_convert.plan.linalg import balanced, eigenbasis
from latentkv_convert.source.frequencies import paired_rows


def correlated(rng: np.random.Generator, rows: int, d: int) -> np.ndarray:
    """[rows, d] inputs with a spread spectrum, as activations have."""
    return rng.normal(size=(rows, d)) * np.geomspace(3, 0.02, d) @ np.linalg.qr(rng.normal(size=(d, d)))[0]


@pytest.fixture
def problem() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs x, projection W [w, d] and the second moment of its outputs."""
    rng = np.random.default_rng(1)
    x, w = correlated(rng, 400, 48), rng.normal(size=(32, 48))
    outputs = x @ w.T
    return x, w, outputs.T @ outputs / len(x)


def test_eigenbasis_of_outputs_is_svd_llm(problem: tuple[np.ndarray, ...]) -> None:
    x, w, moment = problem
    whitener = np.linalg.cholesky(x.T @ x / len(x))
    left, sigma_svd, right = np.linalg.svd(w @ whitener)
    sigma, directions = eigenbasis(moment, "test")
    assert np.allclose(sigma, sigma_svd, rtol=1e-9)
    rank = 12
    basis = balanced(sigma, directions).truncated(rank)
    ours = basis.up.T @ (basis.down.T @ w)
    svd_llm = left[:, :rank] * sigma_svd[:rank] @ right[:rank, : x.shape[1]] @ np.linalg.inv(whitener)
    assert np.linalg.norm(ours - svd_llm) < 1e-8 * np.linalg.norm(svd_llm)


def test_error_is_the_tail_energy(problem: tuple[np.ndarray, ...]) -> None:
    x, w, moment = problem
    sigma, directions = eigenbasis(moment, "test")
    for rank in (1, 7, 16, 31):
        basis = balanced(sigma, directions).truncated(rank)
        error = x @ w.T - x @ w.T @ basis.down @ basis.up
        tail = np.square(sigma[rank:]).sum()
        assert np.isclose(np.square(error).sum() / len(x), tail, rtol=1e-9)


def test_balanced_and_orthonormal_stand_for_the_same_product(problem: tuple[np.ndarray, ...]) -> None:
    sigma, directions = eigenbasis(problem[2], "test")
    basis = balanced(sigma, directions).truncated(9)
    assert np.allclose(basis.down @ basis.up, directions[:, :9] @ directions[:, :9].T, atol=1e-12)
    z = (problem[0] @ problem[1].T) @ basis.down
    assert np.allclose(np.square(z).mean(0), sigma[:9], rtol=1e-9)  # a channel's variance is its sigma


def test_rank_deficient_moment_stays_finite() -> None:
    rng = np.random.default_rng(2)
    rows = rng.normal(size=(5, 16))
    basis = balanced(*eigenbasis(rows.T @ rows, "test"))
    assert np.isfinite(basis.down).all()
    assert np.allclose(basis.down @ basis.up, np.eye(16), atol=1e-9)


@pytest.mark.parametrize(
    "n", [1, 2, 4, 12, 20, 28, 36, 48, 80, 96, 112, 160, 208, 240, 256, 352, 448, 512, 1024]
)
def test_hadamard_orders(n: int) -> None:
    matrix = rotation.hadamard(n)
    assert matrix is not None
    assert set(np.unique(matrix)) <= {-1.0, 1.0}
    assert np.array_equal(matrix @ matrix.T, n * np.eye(n))


def test_every_rank_up_to_512_in_sixteens_has_a_hadamard() -> None:
    assert [n for n in range(16, 513, 16) if rotation.hadamard(n) is None] == []


@pytest.mark.parametrize("n", [3, 16, 25, 72, 90, 130, 272, 576])
def test_rotation_is_orthogonal_and_spreads(n: int) -> None:
    matrix = rotation.rotation(n, np.random.default_rng(n))
    assert np.allclose(matrix @ matrix.T, np.eye(n), atol=1e-12)
    assert np.abs(matrix).max() <= np.sqrt(2 / n) + 1e-12


def test_rotation_stays_inside_segments(problem: tuple[np.ndarray, ...]) -> None:
    basis = balanced(*eigenbasis(problem[2], "test"))
    turned = rotation.fuse(basis, (16, 12, 4), np.random.default_rng(0))
    assert not np.allclose(turned.down, basis.down)
    for rank in (16, 28, 32):  # truncation at a segment's end loses exactly what it lost before
        before = basis.down[:, :rank] @ basis.up[:rank]
        assert np.allclose(turned.down[:, :rank] @ turned.up[:rank], before, atol=1e-12)
    inside = turned.down[:, :20] @ turned.up[:20]
    assert not np.allclose(inside, basis.down[:, :20] @ basis.up[:20], atol=1e-3)


def test_paired_rows_are_the_gguf_permutation() -> None:
    rows = paired_rows(2, 8, 8)
    assert rows.tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    partial = paired_rows(1, 8, 4)  # only the rotated dimensions move
    assert partial.tolist() == [0, 2, 1, 3, 4, 5, 6, 7]


def test_norm_pairing_of_permuted_rows_is_neox_pairing_of_the_original() -> None:
    """RoPE on planes (2i, 2i+1) of permuted q and k gives the scores of planes (i, i + n/2) of the
    original."""
    rng = np.random.default_rng(3)
    q, k = rng.normal(size=(2, 16))
    angles = rng.normal(size=(2, 8))

    def neox(x: np.ndarray, a: np.ndarray) -> np.ndarray:
        lower, upper = x[:8], x[8:]
        return np.concatenate([lower * np.cos(a) - upper * np.sin(a), upper * np.cos(a) + lower * np.sin(a)])

    def norm(x: np.ndarray, a: np.ndarray) -> np.ndarray:
        even, odd = x[::2], x[1::2]
        return np.stack([even * np.cos(a) - odd * np.sin(a), odd * np.cos(a) + even * np.sin(a)], 1).reshape(
            -1
        )

    rows = paired_rows(1, 16, 16)
    assert np.isclose(
        norm(q[rows], angles[0]) @ norm(k[rows], angles[1]), neox(q, angles[0]) @ neox(k, angles[1])
    )
