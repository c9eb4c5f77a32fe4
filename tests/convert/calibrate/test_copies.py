"""Fisher moments of cached copies equal brute-force autograd, by reads through the body copy alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_calibrate import stream
from transformers import AttentionInterface, AutoModelForCausalLM

from latentkv_convert.calibrate import copies, head
from latentkv_convert.calibrate.attention import attention
from latentkv_convert.calibrate.two_copies import TwoCopies
from latentkv_convert.errors import ConvertError

Tiny = Callable[..., Path]
SINK, RECENT, WINDOW = 2, 8, 40
VARIANTS: list[dict[str, Any]] = [
    {},
    {"attention_bias": True},
    {"model_type": "qwen3"},
    {"model_type": "olmo2"},
    {"model_type": "qwen3_5"},
    {"model_type": "qwen3_next"},
]


def body(n: int) -> torch.Tensor:
    at = torch.arange(n)
    return (at[:, None] - at[None, :] >= RECENT) & (at[None, :] >= SINK)


class Probe:
    """Attention over two nodes per token, written out: the body copies carry a zero of their own to
    differentiate by."""

    def __init__(self) -> None:
        self.zeros: dict[tuple[int, str], torch.Tensor] = {}
        self.after_rope: dict[int, torch.Tensor] = {}

    def __call__(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        copies = {}
        self.after_rope[module.layer_idx] = k.detach()
        for side, whole in (("k", k), ("v", v)):
            own = torch.zeros_like(whole, requires_grad=True)
            self.zeros[module.layer_idx, side] = own
            copies[side] = (whole + own).repeat_interleave(module.num_key_value_groups, 1)
        exact_k, exact_v = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (k, v))
        n = q.shape[2]
        old = body(n)
        scores = torch.where(old, q @ copies["k"].mT, q @ exact_k.mT) * module.scaling
        p = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
        out = (p * old) @ copies["v"] + (p * ~old) @ exact_v
        return out.transpose(1, 2).contiguous(), None


def flat(x: torch.Tensor) -> np.ndarray:
    """[1, n_kv, T, head_dim] -> [T, w]"""
    return x[0].transpose(0, 1).flatten(1).double().numpy()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_fisher_moments_equal_autograd_through_the_body_copies(
    tiny: Tiny, variant: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny(**variant)
    source = stream(directory, windows=3, window=WINDOW)
    labels = torch.from_numpy(
        np.random.default_rng(1).integers(0, source.spec.n_vocab, (WINDOW, 2 * head.PAIRS))
    )
    monkeypatch.setattr(head, "drawn", lambda predicted, generator: labels)
    found = dict(copies.collect(source, SINK, RECENT, seed=0))

    probe = Probe()
    AttentionInterface.register("two_nodes", probe)
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, attn_implementation="two_nodes", experts_implementation="eager"
    )
    measured, held = copies.split(3)
    assert (measured, held) == ([0, 1], [2])
    slopes: dict[tuple[int, str], list[np.ndarray]] = {}
    pulls: dict[int, list[np.ndarray]] = {}
    turn = sys.modules[type(model).__module__].apply_rotary_pos_emb
    cos, sin = model.model.rotary_emb(torch.zeros(1, dtype=torch.float64), torch.arange(WINDOW)[None])
    for window in measured:
        logits = model(source.tokens[window : window + 1], use_cache=False).logits[0]
        chosen = logits.gather(1, labels)
        loss = (chosen[:, ::2] - chosen[:, 1::2]).sum() / (2 * head.PAIRS) ** 0.5
        found_slopes = torch.autograd.grad(loss, list(probe.zeros.values()))
        for key, slope in zip(probe.zeros, found_slopes, strict=True):
            if key[1] == "k":
                pulls.setdefault(key[0], []).append(flat(probe.after_rope[key[0]]).T @ flat(slope))
            # a rotation's transpose turns the other way: from after RoPE to before it
            turned = turn(slope, slope, cos, -sin)[0] if key[1] == "k" else slope
            slopes.setdefault(key, []).append(flat(turned))
    assert {layer for layer, _ in slopes} == set(source.spec.attention_layers)
    assert all(
        found[layer].keys() == {"nothing"}
        for layer in range(source.spec.n_layer)
        if (layer, "k") not in slopes
    )
    for layer, expected in pulls.items():
        got = found[layer]["turned_cross"]
        assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < 1e-3, layer
    for (layer, side), parts in slopes.items():
        name = "normed" if side == "k" and "normed_fisher" in found[layer] else side
        rows = np.concatenate([part[SINK:] for part in parts])
        expected = rows.T @ rows / len(rows)
        got = found[layer][f"{name}_fisher"]
        near = 2e-3 if source.spec.block.mixers else 1e-4  # the delta rule in f32: 0.0011 with AVX-512
        assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < near, (layer, side)
        energy = np.square(rows).reshape(len(rows), source.spec.n_kv, -1).sum(2)
        assert np.allclose(found[layer][f"{name}_energy"], energy / energy.mean(0), rtol=1e-2, atol=1e-4)


def test_slopes_of_all_layers_that_read_a_copy_add_up(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 4's last layers read an earlier one's K and V. RoPE, which differs between layers, leaves the
    gradient of a key as long as it is."""
    shared = {"num_kv_shared_layers": 3, "hidden_size_per_layer_input": 32, "attention_k_eq_v": False}
    layers = {
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
    }
    directory = tiny("gemma4", **shared, **layers)
    source = stream(directory, windows=3, window=WINDOW)
    labels = torch.from_numpy(
        np.random.default_rng(1).integers(0, source.spec.n_vocab, (WINDOW, 2 * head.PAIRS))
    )
    monkeypatch.setattr(head, "drawn", lambda predicted, generator: labels)
    monkeypatch.setattr(copies, "LIMIT", 1e9)
    found = dict(copies.collect(source, SINK, RECENT, seed=0))
    assert [found[layer].keys() == {"nothing"} for layer in range(5)] == [False, False, True, True, True]

    probe = Probe()
    AttentionInterface.register("two_nodes", probe)
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, attn_implementation="two_nodes"
    )
    slopes: dict[tuple[int, str], list[np.ndarray]] = {}
    for window in copies.split(3)[0]:
        logits = model(source.tokens[window : window + 1], use_cache=True).logits[0]
        chosen = logits.gather(1, labels)
        loss = (chosen[:, ::2] - chosen[:, 1::2]).sum() / (2 * head.PAIRS) ** 0.5
        of_window: dict[tuple[int, str], np.ndarray] = {}
        for (layer, side), slope in zip(
            probe.zeros, torch.autograd.grad(loss, list(probe.zeros.values())), strict=True
        ):
            key = source.spec.rows_of(layer), side
            of_window[key] = of_window.get(key, 0) + flat(slope)
        for key, whole in of_window.items():
            slopes.setdefault(key, []).append(whole)
    assert {layer for layer, _ in slopes} == {0, 1}
    for (layer, side), parts in slopes.items():
        rows = np.concatenate([part[SINK:] for part in parts])
        n_kv = source.spec.at(layer).n_kv
        energy = np.square(rows).reshape(len(rows), n_kv, -1).sum(2)
        name = "v" if side == "v" else "normed"
        assert np.allclose(found[layer][f"{name}_energy"], energy / energy.mean(0), rtol=1e-2, atol=1e-3)
        traces = np.trace(found[layer][f"{name}_fisher"]), energy.sum() / len(rows)
        assert abs(traces[0] / traces[1] - 1) < 1e-3
        if side == "v":
            expected = rows.T @ rows / len(rows)
            assert np.linalg.norm(found[layer]["v_fisher"] - expected) / np.linalg.norm(expected) < 1e-3


def test_tokens_that_only_the_recent_window_reads_have_no_slope(tiny: Tiny) -> None:
    found = dict(copies.collect(stream(tiny(), windows=1, window=WINDOW), SINK, RECENT, seed=0))
    for layer in found.values():
        for side in "kv":
            energy = layer[f"{side}_energy"].sum(1)
            read_later = WINDOW - SINK - RECENT
            assert (energy[:read_later] > 0).all()
            assert (energy[read_later:] == 0).all()


def test_a_token_that_every_query_reads_does_not_decide_alone() -> None:
    """Ordinary gradients stay as they are, a huge one keeps its direction."""
    slopes = torch.randn(1000, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(copies.limited(slopes), slopes)
    huge = slopes.clone()
    huge[7] *= 1000
    found = copies.limited(huge)
    assert torch.equal(found[:7], slopes[:7])
    assert torch.equal(found[8:], slopes[8:])
    torch.testing.assert_close(found[7] / found[7].norm(), slopes[7] / slopes[7].norm())
    mean = huge.square().sum(1).mean()
    torch.testing.assert_close(found[7].square().sum(), copies.LIMIT * mean)
    assert not copies.limited(torch.zeros_like(slopes)).any()


def test_no_body_copy_is_read_in_a_short_window(tiny: Tiny) -> None:
    source = stream(tiny(), windows=1, window=10)
    with pytest.raises(ConvertError, match="windows longer than sink 2 and recent 8 together; got 10"):
        list(copies.collect(source, SINK, RECENT, seed=0))


@pytest.mark.parametrize("n_head", [2, 4])
def test_equal_copies_change_nothing_and_other_ones_reach_old_queries_alone(n_head: int) -> None:
    rng = torch.Generator().manual_seed(0)
    q = torch.randn(1, n_head, WINDOW, 16, generator=rng)
    k, v, noise = (torch.randn(1, 2, WINDOW, 16, generator=rng) for _ in range(3))
    options = {"is_causal": True, "enable_gqa": True}
    attend = torch.nn.functional.scaled_dot_product_attention
    expected = attend(q, k, v, **options)
    for copy in (None, (k, v)):
        with TwoCopies(2, SINK, RECENT, copy):
            assert torch.allclose(attend(q, k, v, **options), expected, atol=1e-5)
    with TwoCopies(2, SINK, RECENT, (k + noise, v)):
        changed = attend(q, k, v, **options)
    differs = (changed - expected).abs().amax((0, 1, 3)) > 1e-5
    assert not differs[: SINK + RECENT].any()
    assert differs[SINK + RECENT :].all()


@pytest.mark.parametrize("n", [1, 2])
def test_old_queries_read_the_copies(n: int) -> None:
    """And gradients reach what was read, of one sequence and of several."""
    rng = torch.Generator().manual_seed(0)
    q, k, v, old_k, old_v = made = [
        torch.randn(n, 2, WINDOW, 16, generator=rng, requires_grad=True) for _ in range(5)
    ]
    old = body(WINDOW)
    later = ~torch.ones(WINDOW, WINDOW, dtype=torch.bool).tril()
    scores = torch.where(old, q @ old_k.mT, q @ k.mT) / 4
    p = scores.masked_fill(later, -torch.inf).softmax(-1)
    expected = (p * old) @ old_v + (p * ~old) @ v
    with TwoCopies(2, SINK, RECENT, (old_k, old_v)) as copies:
        got = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.allclose(got, expected, atol=1e-5)
    assert torch.equal(copies.found()[0], k)
    slope = torch.randn(got.shape, generator=rng)
    for ours, theirs in zip(
        *(torch.autograd.grad(each, made, slope) for each in (got, expected)), strict=True
    ):
        assert torch.allclose(ours, theirs, atol=1e-5)
    with TwoCopies(2, SINK, RECENT, (old_k, old_v), exact=(k, v)):
        same = torch.nn.functional.scaled_dot_product_attention(q, 2 * k, 3 * v, is_causal=True)
    assert torch.equal(same, got)


def test_sampled_labels_follow_the_seed() -> None:
    logits = torch.randn(50, 20, generator=torch.Generator().manual_seed(0))

    def draw(seed: int) -> list[list[int]]:
        return head.drawn(logits, torch.Generator().manual_seed(seed)).tolist()

    assert draw(1) == draw(1) != draw(2)


@pytest.mark.parametrize(("recent", "batch"), [(8, 4), (8, 32), (5, 3)])
def test_tokens_leave_the_window_in_the_caches_batches(recent: int, batch: int) -> None:
    """A queue that is cut to `recent` tokens after the token that brings it to recent + batch."""
    n = 90
    expected = torch.zeros(n, n, dtype=torch.bool)
    kept: list[int] = []
    for query in range(n):
        expected[query, [key for key in range(SINK, query) if key not in kept]] = True
        kept += [query] if query >= SINK else []
        if len(kept) >= recent + batch:
            kept = kept[-recent:]
    copies = TwoCopies(1, SINK, recent, None, batch)
    assert expected.any()
    for begin in range(0, n, 20):
        rows = slice(begin, min(begin + 20, n))
        body = copies.body(rows, n, torch.device("cpu"))
        found = torch.zeros(rows.stop - begin, n, dtype=torch.bool)
        found[:, body.whole] = True
        found[:, body.edge] = body.mask
        assert torch.equal(found, expected[rows])


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("has_sinks", "softcap"), [(True, 0.0), (False, 2.0), (True, 2.0)])
def test_sinks_and_soft_caps(has_sinks: bool, softcap: float, is_causal: bool) -> None:
    """With exact copies alone: the values and gradients of attention without the mode."""
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randn(1, heads, 150, 16, generator=generator) for heads in (4, 2, 2)]
    mask = None if is_causal else torch.ones(1, 1, 150, 150, dtype=torch.bool).tril().triu(-40)
    sinks = torch.tensor([0.0, 1.0, 3.0, -2.0]) if has_sinks else None

    def run() -> list[torch.Tensor]:
        of = [x.clone().requires_grad_() for x in drawn]
        out = attention(*of, sinks, softcap, mask, is_causal, 0.7)
        return [out.detach(), *torch.autograd.grad((out * out.detach().sin()).sum(), of)]

    expected = run()
    with TwoCopies(n_kv=2, sink=4, recent=32):
        found = run()
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)
