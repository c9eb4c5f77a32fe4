"""Scores and statistics against plain formulas."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.special
import scipy.stats

from latentkv import LatentKVError
from latentkv.measure import divergence as d

RNG = np.random.default_rng(5)
REF = RNG.normal(0, 3, (40, 57)).astype(np.float32)  # softmax far from uniform: entropies of 1 to 3 nats
LOGITS = (REF + RNG.normal(0, 0.4, REF.shape)).astype(np.float32)
TARGETS = RNG.integers(0, 57, 40).astype(np.int32)


def test_scores_equal_the_formulas() -> None:
    p = scipy.special.softmax(REF.astype(np.float64), axis=1)
    q = scipy.special.softmax(LOGITS.astype(np.float64), axis=1)
    at = np.arange(40)
    scores = d.score(LOGITS, TARGETS, REF)
    np.testing.assert_allclose(scores.nll, -np.log(q[at, TARGETS]), rtol=1e-12)
    np.testing.assert_allclose(scores.nll_ref, -np.log(p[at, TARGETS]), rtol=1e-12)
    np.testing.assert_allclose(scores.kld, scipy.stats.entropy(p, q, axis=1), rtol=1e-9)
    np.testing.assert_allclose(scores.dp, q[at, TARGETS] - p[at, TARGETS], atol=1e-12)
    np.testing.assert_array_equal(scores.same_top, p.argmax(1) == q.argmax(1))
    assert 0 < scores.same_top.mean() < 1  # the inputs can tell


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = d.score(LOGITS, TARGETS, REF)
    monkeypatch.setattr(d, "_BLOCK", 3 * 57)
    np.testing.assert_array_equal(d.score(LOGITS, TARGETS, REF).kld, whole.kld)


def test_large_logits_do_not_overflow() -> None:
    scores = d.score(LOGITS + np.float32(1e4), TARGETS, REF * np.float32(100))
    assert all(np.isfinite(values).all() for values in vars(scores).values())


def test_summary() -> None:
    scores = d.score(LOGITS, TARGETS, REF)
    s = d.summary(scores)
    assert s["ppl"] == pytest.approx(np.exp(scores.nll.mean()))
    assert s["nll_se"] == pytest.approx(scipy.stats.sem(scores.nll, ddof=1))
    assert s["ppl_se"] == pytest.approx(s["ppl"] * s["nll_se"])
    assert s["ppl_ratio"] == pytest.approx(s["ppl"] / s["ppl_ref"])
    assert s["kld"]["median"] == pytest.approx(np.median(scores.kld))
    assert s["kld"]["median"] < s["kld"]["p99"] < s["kld"]["p999"] < s["kld"]["max"]
    assert s["rms_dp"] == pytest.approx(np.sqrt((scores.dp**2).mean()))
    # llama-perplexity's formula: the variance of a difference through the covariance of its parts
    nll, ref = scores.nll, scores.nll_ref
    covariance = ((nll * ref).mean() - nll.mean() * ref.mean()) / (nll.size - 1)
    by_parts = np.sqrt(d.mean_se(nll)[1] ** 2 + d.mean_se(ref)[1] ** 2 - 2 * covariance)
    assert s["ppl_ratio_se"] == pytest.approx(s["ppl_ratio"] * by_parts)


def test_equal_caches_diverge_by_nothing() -> None:
    s = d.summary(d.score(REF, TARGETS, REF))
    assert s["kld"]["max"] == 0
    assert s["same_top"] == 1
    assert s["ppl_ratio"] == 1
    assert s["rms_dp"] == 0


def test_by_depth_covers_every_token_once() -> None:
    depth = np.arange(1, 401, 10, dtype=np.int32)
    rows = d.by_depth(d.score(LOGITS, TARGETS, REF), depth)
    assert [(row["from"], row["to"]) for row in rows] == [(0, 64), (64, 128), (128, 256), (256, 512)]
    assert sum(row["tokens"] for row in rows) == 40


def test_broken_logits_are_an_error_not_a_number() -> None:
    broken = LOGITS.copy()
    broken[3, 4] = np.nan
    with pytest.raises(
        LatentKVError, match=r"\[logits\] expected finite numbers; got a row whose largest is nan"
    ):
        d.score(broken, TARGETS)
