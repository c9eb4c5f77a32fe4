"""How well a row of logits predicts the next token, and how far two caches' rows are apart."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentkv.sampling.logprobs import log_softmax

Floats = NDArray[np.float64]
_BLOCK = 1 << 22  # entries per float64 temporary: 32 MiB


@dataclass(frozen=True)
class Scores:
    """Per scored token, [n]. The reference's are None without one. Natural logarithms throughout."""

    nll: Floats  # -log p(token)
    nll_ref: Floats | None = None
    kld: Floats | None = None  # sum over the vocabulary of p_ref (log p_ref - log p)
    same_top: NDArray[np.bool_] | None = None  # both rank the same token first
    dp: Floats | None = None  # p(token) - p_ref(token)


def score(
    logits: NDArray[np.float32], targets: NDArray[np.int32], reference: NDArray[np.float32] | None = None
) -> Scores:
    """Scores logits [n, n_vocab] of `targets` [n], against a reference's logits of the same tokens. float64
    inside."""
    rows = max(1, _BLOCK // logits.shape[1])
    parts = [
        _score_block(
            logits[i : i + rows],
            targets[i : i + rows],
            None if reference is None else reference[i : i + rows],
        )
        for i in range(0, len(logits), rows)
    ]
    return concatenate(parts)


def concatenate(parts: list[Scores]) -> Scores:
    """Scores of several parts as one, in order."""

    def joined(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(part, name) for part in parts])

    if parts[0].nll_ref is None:
        return Scores(joined("nll"))
    return Scores(joined("nll"), joined("nll_ref"), joined("kld"), joined("same_top"), joined("dp"))


def select(scores: Scores, mask: NDArray[np.bool_]) -> Scores:
    """The scores at which `mask` is set."""
    nll, *reference = (None if values is None else values[mask] for values in vars(scores).values())
    assert nll is not None
    return Scores(nll, *reference)


def _score_block(
    logits: NDArray[np.float32], targets: NDArray[np.int32], reference: NDArray[np.float32] | None
) -> Scores:
    at = np.arange(len(targets))
    logp = log_softmax(logits)
    nll = -logp[at, targets]
    if reference is None:
        return Scores(nll)
    logp_ref = log_softmax(reference)
    nll_ref = -logp_ref[at, targets]
    p_ref = np.exp(logp_ref)
    kld = np.einsum("ij,ij->i", p_ref, logp_ref - logp)
    same_top = logits.argmax(axis=1) == reference.argmax(axis=1)
    return Scores(nll, nll_ref, np.maximum(kld, 0.0), same_top, np.exp(-nll) - np.exp(-nll_ref))


def mean_se(values: NDArray[Any]) -> tuple[float, float]:
    """Mean and its standard error; the error of a single value is 0."""
    n = values.size
    return float(values.mean()), float(values.std() / np.sqrt(n - 1)) if n > 1 else 0.0


def summary(scores: Scores) -> dict[str, Any]:
    """Perplexity with standard errors and, with a reference, the statistics that llama-perplexity prints."""
    nll, nll_se = mean_se(scores.nll)
    ppl = float(np.exp(nll))
    result: dict[str, Any] = {
        "ppl": ppl,
        "ppl_se": ppl * nll_se,
        "nll": nll,
        "nll_se": nll_se,
        "tokens": int(scores.nll.size),
    }
    if scores.nll_ref is None or scores.kld is None or scores.same_top is None or scores.dp is None:
        return result
    ratio, ratio_se = mean_se(scores.nll - scores.nll_ref)
    kld, kld_se = mean_se(scores.kld)
    same, same_se = mean_se(scores.same_top)
    dp, dp_se = mean_se(scores.dp)
    dp2, dp2_se = mean_se(scores.dp**2)
    rms = float(np.sqrt(dp2))
    quantile = {
        name: float(np.quantile(scores.kld, q))
        for name, q in (("median", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99), ("p999", 0.999))
    }
    return result | {
        "ppl_ref": float(np.exp(scores.nll_ref.mean())),
        "ppl_ratio": float(np.exp(ratio)),
        "ppl_ratio_se": float(np.exp(ratio)) * ratio_se,
        "kld": {"mean": kld, "mean_se": kld_se, **quantile, "max": float(scores.kld.max())},
        "same_top": same,
        "same_top_se": same_se,
        "mean_dp": dp,
        "mean_dp_se": dp_se,
        "rms_dp": rms,
        "rms_dp_se": 0.5 * dp2_se / rms if rms else 0.0,
    }


def by_depth(scores: Scores, depth: NDArray[np.int32]) -> list[dict[str, Any]]:
    """summary() per power-of-two range of `depth` [n], the number of tokens before the scored one."""
    edges = [0, 64]
    while edges[-1] <= depth.max():
        edges.append(2 * edges[-1])
    rows = []
    for low, high in itertools.pairwise(edges):
        mask = (depth >= low) & (depth < high)
        if mask.any():
            rows.append({"from": low, "to": high, **summary(select(scores, mask))})
    return rows
