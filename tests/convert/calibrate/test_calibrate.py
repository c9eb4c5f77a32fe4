"""Streaming statistics equal those of the whole model; the store returns what it was given."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from latentkv_convert import calibrate
from latentkv_convert.calibrate import decoder, fisher, kept, moments
from latentkv_convert.calibrate import stream as stream_module
from latentkv_convert.calibrate.decoder import Ends, Layer
from latentkv_convert.calibrate.sample import Encoded, Sample, encode
from latentkv_convert.calibrate.saved.store import Store
from latentkv_convert.calibrate.stream import LayerStream
from latentkv_convert.errors import ConvertError
from latentkv_convert.recipe import Recipe
from latentkv_convert.source.checkpoint_source import CheckpointSource

Tiny = Callable[..., Path]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"attention_bias": True},
    {"tie_word_embeddings": True},
    {"model_type": "qwen3_5"},
    {"model_type": "qwen3_next"},
]


def stream(directory: Path, windows: int = 3, window: int = 40) -> LayerStream:
    source = CheckpointSource(directory)
    tokens = np.random.default_rng(0).integers(0, source.spec.n_vocab, (windows, window))
    return LayerStream(source, tokens, "cpu", "test")


def test_layers_stay_as_far_as_there_is_room(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three layers fit; what a second pass reads anew is the third. It computes the same."""
    first = stream(tiny(num_hidden_layers=3))
    size = sum(each.nbytes for each in Layer(first.source, 0).parameters())
    monkeypatch.setattr(kept, "_free_bytes", lambda device: int(2.5 * size / kept.ROOM))
    known, read, ends = kept.Kept(), list[int](), list[int]()
    monkeypatch.setattr(stream_module, "Layer", lambda *args: read.append(args[1]) or Layer(*args))
    monkeypatch.setattr(decoder, "Ends", lambda *args: ends.append(1) or Ends(*args))
    outputs = []
    for repeats in (False, True, True):
        known.make_room(first.source, torch.device("cpu"), repeats)
        again = LayerStream(first.source, first.tokens.numpy(), "cpu", "test", kept=known)
        hidden = again.embed()
        for index in range(3):
            with again.layer(index, index + 1) as live:
                hidden = torch.cat([again.run(live, index, window[None]) for window in hidden])
        outputs.append(hidden)
    assert read == [0, 1, 2, 0, 1, 2, 2]  # a host keeps none unless a model runs many times
    assert len(ends) == 1
    assert torch.equal(outputs[0], outputs[2])
    known.clear()
    assert not known.layers


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_moments_equal_hooks_on_the_whole_model(tiny: Tiny, variant: dict[str, Any]) -> None:
    directory = tiny(**variant)
    source = stream(directory)
    found = dict(moments.collect(source))
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, experts_implementation="eager"
    )
    seen: dict[tuple[int, str], list[torch.Tensor]] = {}
    for index in source.spec.attention_layers:
        layer = model.model.layers[index]
        for side in "kv":
            module = layer.self_attn.get_submodule(f"{side}_proj")
            rows = seen.setdefault((index, side), [])
            module.register_forward_hook(
                lambda module, args, output, rows=rows: rows.append(
                    torch.nn.functional.linear(args[0], module.weight)
                )
            )
    with torch.no_grad():
        model(source.tokens, use_cache=False)
    for (index, side), rows in seen.items():
        flat = rows[0].reshape(-1, rows[0].shape[-1])
        expected = (flat.T @ flat / len(flat)).numpy()
        error = np.linalg.norm(found[index][side] - expected) / np.linalg.norm(expected)
        assert error < 1e-5
        assert np.allclose(found[index][f"{side}_mean"], flat.mean(0).numpy(), atol=1e-4)


def test_no_layer_keeps_its_weights(tiny: Tiny) -> None:
    """Memory: never more than one layer, on the way up and down."""
    for _ in fisher.collect(stream(tiny())):
        assert sum(type(found) is Layer for found in gc.get_objects()) <= 1


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_fisher_equals_autograd_on_the_whole_model(tiny: Tiny, variant: dict[str, Any]) -> None:
    directory = tiny(**variant)
    source = stream(directory)
    found = dict(fisher.collect(source))
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, experts_implementation="eager"
    )
    squares: dict[tuple[int, str], Any] = {}
    for window in source.tokens:
        model.zero_grad()
        # transformers shifts labels itself: labels = inputs is the next-token loss
        model(window[None], labels=window[None], use_cache=False).loss.backward()
        for index in source.spec.attention_layers:
            layer = model.model.layers[index]
            for side in "kv":
                gradient = layer.self_attn.get_submodule(f"{side}_proj").weight.grad
                squares[index, side] = squares.get((index, side), 0) + gradient**2
    n_kv = source.spec.n_kv
    for (index, side), total in squares.items():
        expected = (total / source.n_windows).sqrt().reshape(n_kv, -1).mean(1).numpy()
        assert np.allclose(found[index][side], expected, rtol=1e-3)


def test_too_few_tokens_for_the_width_are_announced(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tiny()
    list(moments.collect(stream(directory, windows=1)))
    warning = "warning: [--calib] expected at least 256 tokens for 64 outputs; got 40"
    assert warning in capsys.readouterr().err


def test_non_finite_activations_name_the_layer(tiny: Tiny) -> None:
    source = stream(tiny())
    hidden = source.embed()
    hidden[0, 3] = float("nan")
    with (
        source.layer(1) as live,
        pytest.raises(ConvertError, match=r"\[layer 1\] expected finite activations"),
    ):
        source.run(live, 1, hidden[:1])


def test_sample_spreads_over_the_text_and_is_seeded() -> None:
    text = Encoded(np.arange(10_000), np.array([7]))
    sample = Sample.draw(text, 1000, 100, seed=1)
    assert sample.tokens.shape == (10, 100)
    assert (sample.tokens[:, 0] == 7).all()
    first = sample.tokens[:, 1]
    assert (np.abs(first - 1000 * np.arange(10) - 500) <= 600).all()  # one window from each tenth
    assert (np.diff(sample.tokens[:, 1:], axis=1) == 1).all()
    assert sample.digest == Sample.draw(text, 1000, 100, seed=1).digest
    assert sample.digest != Sample.draw(text, 1000, 100, seed=2).digest


def test_sample_of_a_short_text_is_all_of_it() -> None:
    sample = Sample.draw(Encoded(np.arange(300), np.array([], dtype=np.int64)), 65536, 2048, seed=0)
    assert sample.tokens.shape == (1, 300)


def test_windows_to_run_a_plan_on_are_longer_and_apart() -> None:
    """From those that statistics see, and from each other; of another text where there is one."""
    text = Encoded(np.arange(20_000), np.array([99_999]))
    sample = Sample.draw(text, 4000, 100, seed=1, deep=200)
    assert sample.tokens.shape == (40, 100)
    assert sample.spare.shape == sample.deep.shape == (8, 199)  # two bodies of 99 tokens after one BOS
    parts = [set(part[:, 1:].flatten().tolist()) for part in (sample.tokens, sample.spare, sample.deep)]
    assert not parts[0] & parts[1] | parts[0] & parts[2] | parts[1] & parts[2]
    other = Encoded(np.arange(50_000, 50_500), text.bos)
    both = Sample.draw(text, 4000, 100, seed=1, deep=200, other=other)
    assert both.digest == sample.digest
    assert both.spare.shape == (2, 199)
    assert both.spare[0, 1] == 50_000
    assert not set(both.deep[:, 1:].flatten().tolist()) & parts[0]
    short = Sample.draw(Encoded(np.arange(700), text.bos), 4000, 100, seed=1, deep=200)
    assert len(short.deep) == 0


def test_encoding_follows_the_tokenizer(demo: Path) -> None:
    from transformers import AutoTokenizer

    text = (demo / "sample-val.txt").read_text(encoding="utf-8")[:4000]
    encoded = encode(text, CheckpointSource(demo))
    assert encoded.ids.tolist() == AutoTokenizer.from_pretrained(demo).encode(text)
    assert encoded.bos.size == 0  # this tokenizer adds none


def test_second_run_reads_the_store(tiny: Tiny, calib: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny()
    recipe = Recipe(directory, Path("out"), "palu", calib=(calib,), calib_tokens=512, calib_window=128)
    source = CheckpointSource(directory)
    first, _ = calibrate.collect(("moments",), recipe, source)

    def refuse(*args: Any) -> None:
        raise AssertionError("the model ran although its statistics are in the store")

    monkeypatch.setattr(moments, "collect", refuse)
    second, _ = calibrate.collect(("moments",), recipe, source)
    for before, after in zip(first["moments"], second["moments"], strict=True):
        assert all(np.array_equal(before[name], after[name]) for name in before)
    other = tiny(name="other", rms_norm_eps=1e-6)
    with pytest.raises(AssertionError, match="the model ran"):
        calibrate.collect(("moments",), recipe, CheckpointSource(other))


def test_store_without_all_layers_is_not_a_hit(tmp_path: Path) -> None:
    store = Store(root=tmp_path)
    store.save("key", 2, [(1, {"a": np.zeros(2)}), (0, {"a": np.ones(2)})])
    assert store.load("key", 3) is None
    found = store.load("key", 2)
    assert found is not None
    assert found[1]["a"].tolist() == [0, 0]


@pytest.mark.parametrize(
    "variant", [{}, {"model_type": "qwen3"}, {"model_type": "olmo2"}, {"model_type": "qwen3_5"}], ids=str
)
def test_products_of_bf16_are_near_those_of_f32(tiny: Tiny, variant: dict[str, Any]) -> None:
    """Values and gradients of a layer; those of k and v themselves stay f32."""
    exact = stream(tiny(**variant))
    reduced = LayerStream(exact.source, exact.tokens.numpy(), "cpu", "test", reduced=True)
    torch.manual_seed(0)
    above = torch.randn_like(exact.embed()[:1])
    index, found = exact.spec.attention_layers[0], []
    for each in (exact, reduced):
        with each.layer(index) as live:
            x = each.embed()[:1].requires_grad_()
            attended = live.attended(x, each.positions)
            past, through = live.fed_slope(x, attended, above)
            (below,) = torch.autograd.grad(attended, x, through)
            rows = live.get_submodule("attn_k")(live.attention_input(x))
            output = each.run(live, index, x)
            found.append([rows, output, below + past, each.logits(output)])
    for at, (a, b) in enumerate(zip(*found, strict=True)):
        error = float((a - b).norm() / a.norm())
        assert error < 0.02, at
        assert (error > 0) == (at > 0), at


def test_a_delta_net_in_bf16_is_near_that_in_f32(tiny: Tiny) -> None:
    exact = stream(tiny("qwen3_5"))
    reduced = LayerStream(exact.source, exact.tokens.numpy(), "cpu", "test", reduced=True)
    outputs = []
    for each in (exact, reduced):
        with each.layer(0) as live, torch.no_grad():
            outputs.append(each.run(live, 0, each.embed()[:1]))
    assert 0 < float((outputs[0] - outputs[1]).norm() / outputs[0].norm()) < 0.02


def test_slopes_of_a_layer_in_parts(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch finds them for the whole layer, with and without a norm behind the FFN."""
    monkeypatch.setattr(decoder, "FFN_TOKENS", 7)
    for variant in ({}, {"model_type": "olmo2"}, {"model_type": "falcon"}):
        live_stream = stream(tiny(**variant, name="-".join(variant.values()) or "llama"))
        torch.manual_seed(0)
        x = live_stream.embed()[:1].requires_grad_()
        above = torch.randn_like(x)
        with live_stream.layer(0) as live:
            (expected,) = torch.autograd.grad(live_stream.run(live, 0, x), x, above)
            attended = live.attended(x, live_stream.positions)
            past, through = live.fed_slope(x, attended, above)
            (below,) = torch.autograd.grad(attended, x, through)
        torch.testing.assert_close(below + past, expected, rtol=1e-3, atol=1e-5)
