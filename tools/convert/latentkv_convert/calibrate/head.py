"""What the head makes of the last layer's output, a block of tokens at a time: 2048 tokens' logits over
262144 entries, their softmax and their gradients would take 2 GiB each."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .stream import LayerStream

N_LOGITS = 1 << 25  # at a time, 128 MiB in float32


def blocks(stream: LayerStream, n_tokens: int) -> Iterator[slice]:
    size = max(1, N_LOGITS // stream.ends.token_embd.shape[0])
    for start in range(0, n_tokens, size):
        yield slice(start, min(start + size, n_tokens))


def text_slope(stream: LayerStream, window: int, hidden: Tensor) -> Tensor:
    """Gradient [window, d] of the text's mean negative log-likelihood by hidden [1, window, d]."""
    following = stream.tokens[window].to(stream.device)[1:]
    slope = _slope(stream, hidden[:, :-1], lambda predicted, block: following[block])
    return torch.cat([slope, torch.zeros_like(slope[:1])]) / len(following)


def drawn_slope(stream: LayerStream, hidden: Tensor, generator: torch.Generator) -> Tensor:
    """Gradient [window, d] by hidden [1, window, d] of the summed negative log-likelihood of labels that are
    drawn from the prediction itself."""

    return _slope(stream, hidden, lambda predicted, block: drawn(predicted, generator))


def drawn(predicted: Tensor, generator: torch.Generator) -> Tensor:
    """One label per row of logits, from its own distribution."""
    return torch.multinomial(predicted.softmax(-1), 1, generator=generator)[:, 0]


def _slope(stream: LayerStream, hidden: Tensor, labels: Callable[[Tensor, slice], Tensor]) -> Tensor:
    """[n, d], of the summed negative log-likelihood of labels(logits of a block, block)."""
    slopes = []
    for block in blocks(stream, hidden.shape[1]):
        with torch.enable_grad():
            top = hidden[:, block].detach().requires_grad_()
            predicted = stream.logits(top)
            surprise = torch.nn.functional.cross_entropy(
                predicted, labels(predicted.detach(), block), reduction="sum"
            )
            slopes.append(torch.autograd.grad(surprise, top)[0][0])
    return torch.cat(slopes)


@torch.no_grad()
def divergence(stream: LayerStream, exact: Tensor, other: Tensor) -> float:
    """Mean KL(exact ‖ other) of the predictions, nats per token, from outputs [n, d] of the last layer."""
    total = 0.0
    for block in blocks(stream, len(exact)):
        p, q = (stream.logits(each[None, block]).log_softmax(-1) for each in (exact, other))
        total += float((p.exp() * (p - q)).sum(-1).double().sum())
    return total / len(exact)
