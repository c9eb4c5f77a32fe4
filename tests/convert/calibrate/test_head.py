"""Gradients and divergences that are taken a block of tokens at a time equal those of whole windows."""

from __future__ import annotations

import pytest
import torch
from test_calibrate import stream
from torch.nn.functional import cross_entropy

from conftest import Tiny
from latentkv_convert.calibrate import fisher, head
from latentkv_convert.calibrate.stream import LayerStream

BLOCK = 7  # tokens: no divisor of a window


@pytest.fixture
def blocked(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> LayerStream:
    live = stream(tiny())
    monkeypatch.setattr(head, "N_LOGITS", BLOCK * live.ends.token_embd.shape[0])
    return live


def outputs(live: LayerStream, n: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(n, live.tokens.shape[1], live.spec.n_embd)


def test_slope_of_the_text(blocked: LayerStream) -> None:
    """The published code shifts the labels twice; the two losses must not be confused."""
    hidden = outputs(blocked, 1).requires_grad_()
    predicted, tokens = blocked.logits(hidden), blocked.tokens[0]
    once, twice = (cross_entropy(predicted[:-shift], tokens[shift:]) for shift in (1, 2))
    (expected,) = torch.autograd.grad(once, hidden, retain_graph=True)
    (other,) = torch.autograd.grad(twice, hidden)
    found = fisher.text_slope(blocked, 0, hidden.detach())
    torch.testing.assert_close(found, expected[0])
    assert (found - other[0]).norm() > 0.1 * found.norm()


def test_slope_of_drawn_labels(blocked: LayerStream, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = outputs(blocked, 1).requires_grad_()
    labels = torch.randint(blocked.ends.token_embd.shape[0], (hidden.shape[1], 2 * head.PAIRS))
    left = list(labels.split(BLOCK))
    monkeypatch.setattr(head, "drawn", lambda predicted, generator: left.pop(0))
    sums = [cross_entropy(blocked.logits(hidden), each, reduction="sum") for each in labels.T]
    (expected,) = torch.autograd.grad((sum(sums[1::2]) - sum(sums[::2])) / (2 * head.PAIRS) ** 0.5, hidden)
    torch.testing.assert_close(head.drawn_slope(blocked, hidden.detach(), torch.Generator()), expected[0])
    assert not left


def test_drawn_slopes_have_the_fisher_information_of_the_prediction(blocked: LayerStream) -> None:
    """E[g gᵀ] = Jᵀ (diag(p) - p pᵀ) J, with J the logits' derivative by the hidden state."""
    generator = torch.Generator().manual_seed(1)
    top = outputs(blocked, 1)[0, :1]
    p = blocked.logits(top[None])[0].double().softmax(-1)
    jacobian = torch.autograd.functional.jacobian(lambda x: blocked.logits(x[None, None])[0], top[0]).double()
    expected = jacobian.T @ (torch.diag(p) - torch.outer(p, p)) @ jacobian
    n = 40_000
    many = [head.drawn_slope(blocked, top.expand(1, n // 8, -1), generator).double() for _ in range(8)]
    found = sum(g.T @ g for g in many) / n
    assert (found - expected).norm() < 0.03 * expected.norm()


def test_labels_are_drawn_with_their_probabilities() -> None:
    """Over a vocabulary that its runs of entries do not divide."""
    logits = 2 * torch.randn(1, 83, generator=torch.Generator().manual_seed(0))
    logits[0, 7] = -torch.inf
    n = 50_000
    labels = head.drawn(logits.expand(n, -1), torch.Generator().manual_seed(1))
    expected = logits[0].double().softmax(0)
    for drawn in labels.T:
        share = drawn.bincount(minlength=83) / n
        assert share[7] == 0
        assert ((share - expected).abs() < 5 * (expected / n).sqrt() + 1e-6).all()
    first, second = labels[:, :2].T
    both = (first == second).double().mean()
    assert float(both) == pytest.approx(float(expected.square().sum()), rel=0.1)


def test_divergence(blocked: LayerStream) -> None:
    hidden = outputs(blocked, 2)
    p, q = (blocked.logits(each[None]).log_softmax(-1).double() for each in hidden)
    expected = float((p.exp() * (p - q)).sum(-1).mean())
    assert head.divergence(blocked, *hidden) == pytest.approx(expected, rel=1e-4)
    assert expected > 0.01
