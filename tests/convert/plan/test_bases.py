"""Bases and their bookkeeping: averages over positions, tied and untied splits, fused forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import TINY

from latentkv_convert.fuse import energy, rotation
from latentkv_convert.ir import F64, Basis
from latentkv_convert.plan.linalg import eigenbasis, tied, untied
from latentkv_convert.plan.methods.zack import block_diagonal, normalised
from latentkv_convert.rows import quantizer, served
from latentkv_convert.source import archs
from latentkv_convert.source.frequencies import frequencies

RNG = np.random.default_rng(11)


def spread(rows: int, n: int, decay: float = 0.05) -> F64:
    """[rows, n] with a spectrum that falls to `decay`, in random directions, and a mean."""
    turn = np.linalg.qr(RNG.normal(size=(n, n)))[0]
    return (RNG.normal(size=(rows, n)) * np.geomspace(3.0, decay, n) + 0.3) @ turn


def turn_matrix(freqs: F64, head_dim: int, n_heads: int, position: int) -> F64:
    """R_n [n_heads·head_dim, same]: transformers' planes (i, i + n_rot/2), the rest untouched."""
    half = len(freqs)
    head = np.eye(head_dim)
    for i, angle in enumerate(position * freqs):
        head[np.ix_([i, i + half], [i, i + half])] = [
            [np.cos(angle), -np.sin(angle)],
            [np.sin(angle), np.cos(angle)],
        ]
    return block_diagonal(np.stack([head] * n_heads))


@pytest.mark.parametrize(
    ("head_dim", "n_rot", "n_heads", "context"), [(16, 16, 1, 40), (16, 8, 3, 7), (6, 6, 2, 1)]
)
def test_positions_are_averaged_in_closed_form(head_dim: int, n_rot: int, n_heads: int, context: int) -> None:
    freqs = 100.0 ** (-np.arange(0, n_rot, 2) / n_rot)
    rows = spread(200, n_heads * head_dim)
    moment = rows.T @ rows / 200
    turns = [turn_matrix(freqs, head_dim, n_heads, n) for n in range(context)]
    expected = np.mean([turn @ moment @ turn.T for turn in turns], axis=0)
    got = served.after_rope(moment, freqs, head_dim, context)
    assert np.linalg.norm(got - expected) < 1e-12 * np.linalg.norm(expected)
    wrong = served.after_rope(moment, freqs, head_dim, context + 1)
    assert np.linalg.norm(wrong - expected) > 1e-4 * np.linalg.norm(expected)


def test_frequencies_are_those_transformers_scales() -> None:
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

    plain = TINY["llama"]
    scaled = plain | {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    }
    for config in (plain, scaled, plain | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}):
        expected = LlamaRotaryEmbedding(LlamaConfig(**config)).inv_freq.double().numpy()
        got = frequencies(archs.model_spec(config), 512, 0)
        assert np.linalg.norm(got - expected) < 1e-6 * np.linalg.norm(expected)


def score_error(basis: Basis, rank: int, q: F64, k: F64) -> float:
    cut = basis.truncated(rank)
    exact = q @ k.T
    return float(np.linalg.norm((q @ cut.up.T) @ (k @ cut.down).T - exact) / np.linalg.norm(exact))


def test_untied_projections_give_the_best_scores_of_every_rank() -> None:
    n = 32
    q, k = 4 * spread(300, n), spread(500, n)
    read, cached = q.T @ q, k.T @ k
    best = untied(cached, read, "here")
    stacked = tied(*eigenbasis(cached + read, "here"), cached, read)
    alone = tied(*eigenbasis(cached, "here"), cached, read)
    sigma = np.linalg.svd(q @ k.T, compute_uv=False)[:n]
    for rank in (4, 12, 24):
        optimum = float(np.linalg.norm(sigma[rank:]) / np.linalg.norm(sigma))
        assert abs(score_error(best, rank, q, k) - optimum) < 1e-6
        assert score_error(best, rank, q, k) < min(score_error(b, rank, q, k) for b in (stacked, alone))


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_full_rank_is_the_identity_and_both_sides_spread_alike(kind: str) -> None:
    n = 24
    q, k = 7 * spread(200, n, 1e-3), spread(200, n, 1e-3)
    read, cached = q.T @ q / 200, k.T @ k / 200
    basis = untied(cached, read, "") if kind == "untied" else tied(*eigenbasis(cached, ""), cached, read)
    assert np.linalg.norm(basis.down @ basis.up - np.eye(n)) < 1e-8
    turned = rotation.fuse(basis, (16, 8), np.random.default_rng(0))
    assert np.linalg.norm(turned.down @ turned.up - np.eye(n)) < 1e-8
    latent, query = (np.square(rows).mean(0) for rows in (k @ basis.down, q @ basis.up.T))
    assert latent[:8] == pytest.approx(query[:8], rel=1e-6)  # second moments: a mean counts as spread


def test_a_rotation_changes_no_score_of_a_truncated_pair() -> None:
    q, k = spread(50, 32), spread(60, 32)
    basis = untied(k.T @ k, q.T @ q, "").truncated(16)
    turned = rotation.fuse(basis, (16,), np.random.default_rng(3))
    before, after = ((q @ b.up.T) @ (k @ b.down).T for b in (basis, turned))
    assert np.linalg.norm(before - after) < 1e-10 * np.linalg.norm(before)


def test_late_up_projection_equals_the_fused_output_projection() -> None:
    """B_v on the mixture, then W_o, equals one matrix: the format keeps the former, which is smaller."""
    head_dim, d, tokens, rank = 16, 40, 30, 12
    v, w_o = spread(tokens, head_dim), RNG.normal(size=(d, head_dim))
    weights = np.exp(RNG.normal(size=tokens) * 2)
    weights /= weights.sum()
    cut = untied(v.T @ v, w_o.T @ w_o, "").truncated(rank)
    late = w_o @ (cut.up.T @ (weights @ (v @ cut.down)))
    fused = (w_o @ cut.up.T) @ (weights @ (v @ cut.down))
    assert np.linalg.norm(late - fused) < 1e-12 * np.linalg.norm(fused)


def test_stacked_blocks_do_not_depend_on_their_scales() -> None:
    v, w_o = spread(500, 16).T, spread(40, 16).T
    one, other = (normalised(scale * v @ v.T) + normalised(w_o @ w_o.T) for scale in (1.0, 1e6))
    assert np.linalg.norm(one - other) < 1e-12 * np.linalg.norm(one)


@pytest.mark.parametrize("width", [32, 64, 128])
def test_few_bits_come_back_with_the_energy_they_were_stored_with(width: int) -> None:
    """Levels of least squared error lose a third of it with one bit."""
    formats, latent = ("q4", "q2", "q1", "none"), torch.randn(4096, 4, width)
    basis = Basis(np.ones(4 * width), np.eye(4 * width), np.eye(4 * width))
    up = torch.from_numpy(energy.regained(basis, (width,) * 4, formats).up).float()
    held = torch.stack(
        [quantizer.stored(part, name) for part, name in zip(latent.unbind(1), formats, strict=True)], 1
    )
    back = (held.flatten(1) @ up).view_as(latent)
    found = (back.square().sum((0, 2)) / latent.square().sum((0, 2))).tolist()
    assert found == pytest.approx([1, 1, 1, 0], abs=0.07)
    assert float(held[:, 2].square().sum() / latent[:, 2].square().sum()) < 0.7
