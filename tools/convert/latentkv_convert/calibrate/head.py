"""What the head makes of the last layer's output, a block of tokens at a time: 2048 tokens' logits over
262144 entries, their softmax and their gradients would take 2 GiB each."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .stream import LayerStream

N_LOGITS = 1 << 25  # at a time, 128 MiB in float32
PAIRS = 8
N_HOST_LOGITS = 1 << 22  # likewise on a processor, whose cache holds as many


def blocks(stream: LayerStream, n_tokens: int) -> Iterator[slice]:
    most = min(N_LOGITS, N_HOST_LOGITS) if stream.device.type == "cpu" else N_LOGITS
    size = max(1, most // stream.ends.token_embd.shape[0])
    for start in range(0, n_tokens, size):
        yield slice(start, min(start + size, n_tokens))


def drawn_slope(stream: LayerStream, hidden: Tensor, generator: torch.Generator) -> Tensor:
    """Gradient [window, d] by hidden [1, window, d] of the summed log-likelihood ratios of PAIRS pairs of
    labels, over the root of 2 PAIRS. They are drawn from the prediction p itself: with e and f the unit
    vectors of a pair, ½ E[(e - f)(e - f)ᵀ] = diag(p) - p pᵀ, as of the negative log-likelihood of one drawn
    label, without a product of all probabilities with the head. A sum of pairs spreads less in its fourth
    moments, and what is measured on it is as certain with fewer tokens.
    """
    signs = torch.tensor([1.0, -1.0], device=hidden.device).repeat(PAIRS) / (2 * PAIRS) ** 0.5
    slopes = []
    for block in blocks(stream, hidden.shape[1]):
        with torch.no_grad():
            labels = drawn(stream.logits(hidden[:, block]), generator)
        with torch.enable_grad():
            top = hidden[:, block].detach().requires_grad_()
            ratios = stream.ends.logits_of(top, labels[None]) @ signs
            slopes.append(torch.autograd.grad(ratios.sum(), top)[0][0])
    return torch.cat(slopes)


def drawn(predicted: Tensor, generator: torch.Generator) -> Tensor:
    """[n, 2 PAIRS]: independent labels per row of logits [n, n_vocab], from its own distribution. First one
    of some hundred runs of entries is drawn, then one of its entries: sums of as many numbers in f32 lose
    none."""
    weights = predicted.softmax(-1)
    n_vocab = weights.shape[1]
    size = math.isqrt(n_vocab)
    whole = n_vocab // size * size
    sums = [weights[:, :whole].unflatten(1, (-1, size)).sum(-1), weights[:, whole:].sum(-1, keepdim=True)]
    run = _drawn_from(torch.cat(sums, dim=1).double()[:, None].expand(-1, 2 * PAIRS, -1), generator)
    entries = run[..., None] * size + torch.arange(size, device=run.device)  # [n, 2 PAIRS, size]
    inside = entries < n_vocab
    entries.clamp_(max=n_vocab - 1)
    chosen = weights.gather(1, entries.flatten(1)).view_as(entries).double() * inside
    return run * size + _drawn_from(chosen, generator)


def _drawn_from(weights: Tensor, generator: torch.Generator) -> Tensor:
    """[…]: of each row of weights [..., k] one index, with probabilities in proportion to them."""
    sums = weights.cumsum(-1)
    at = torch.rand(sums.shape[:-1], generator=generator, device=sums.device, dtype=sums.dtype)
    found = torch.searchsorted(sums, (at * sums[..., -1])[..., None], right=True)[..., 0]
    return found.clamp_(max=sums.shape[-1] - 1)


@torch.no_grad()
def divergence(stream: LayerStream, exact: Tensor, other: Tensor) -> float:
    """Mean KL(exact ‖ other) of the predictions, nats per token, from outputs [n, d] of the last layer."""
    total = 0.0
    for block in blocks(stream, len(exact)):
        p, q = (stream.logits(each[None, block]).log_softmax(-1) for each in (exact, other))
        total += float((p.exp() * (p - q)).sum(-1).double().sum())
    return total / len(exact)
