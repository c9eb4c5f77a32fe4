"""LoRA recovery: the factored model is the compressed one, training improves it, and the file holds what was
trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from both import distance, load, logits, run, session, token_ids
from test_matrix import arguments, planned

from conftest import TEXT, Tiny
from latentkv.errors import LatentKVError
from latentkv_convert.calibrate.decoder import Decoder
from latentkv_convert.cli import parse
from latentkv_convert.errors import ConvertError
from latentkv_convert.recover import factored, lora
from latentkv_convert.work import Work

PALU = ["palu", "--allocate", "uniform"]


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a text; sequences are short, so that a step is quick."""
    (tmp_path / "calib.txt").write_text(TEXT, encoding="utf-8")
    monkeypatch.setattr(lora, "WINDOW", 64)
    return tmp_path


def with_training(room: Path, *options: str) -> list[str]:
    return [
        "--finetune",
        str(room / "calib.txt"),
        "--steps",
        "3",
        "--lr",
        "0.01",
        "--lora-rank",
        "4",
        *options,
    ]


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("llama", {"attention_bias": True}),
        ("qwen3", {}),
        ("phi3", {}),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
        ("opt", {}),
        ("mpt", {}),
    ],
)
def test_the_factored_model_is_the_compressed_model(
    model_type: str, config: dict[str, Any], tiny: Tiny, room: Path
) -> None:
    directory, ids = tiny(model_type, **config), token_ids(60)
    work, plan = planned(directory, arguments(room, [*PALU, "--group", "1"], 0.6))
    with reference.compressed(load(directory), work, plan) as truncated:
        expected = logits(truncated, ids)
    model = Decoder(work.source)
    factored.install(model, work, plan)
    with torch.no_grad():
        got = model(torch.tensor([ids]))[0].numpy()
    assert distance(got, expected) < 1e-5
    assert distance(logits(load(directory), ids), expected) > 0.05


def install_trained(model: Any, work: Work, trained: factored.Trained) -> None:
    """Weights that the trained factors multiply to."""
    for (layer, side), bases in trained.items():
        products = [basis.up.T @ basis.rows for basis in bases if basis.rows is not None]
        assert len(products) == len(bases)
        mu, own = reference.mean(work, layer, side), work.bias(layer, side)
        stored = [part @ b.down @ b.up for b, part in zip(bases, np.split(mu, len(bases)), strict=True)]
        bias = mu - np.concatenate(stored) + (0 if own is None else own)
        new = np.concatenate(products).astype(np.float32)
        reference.replace(model, work, layer, side, new, bias)


@pytest.mark.parametrize("model_type", ["llama", "phi3", "opt"])
def test_the_file_holds_what_was_trained(model_type: str, tiny: Tiny, room: Path) -> None:
    """Rotated after training: A and B turn together, K's and V's alike."""
    directory, ids = tiny(model_type), token_ids(60)
    options = [*arguments(room, [*PALU, "--group", "1"], 0.6), *with_training(room)]
    work, plan = planned(directory, options)
    recipe = parse([str(directory), "-o", str(room / "out.gguf"), *options], "test")
    trained, found = lora.train(recipe, work, plan)
    again, _ = lora.train(recipe, work, plan)
    model = load(directory)
    install_trained(model, work, trained)
    expected = logits(model, ids)
    install_trained(model, work, again)
    assert np.array_equal(logits(model, ids), expected)  # seeded
    assert found.after != found.before

    got = session(run(directory, room / "out.gguf", *options), n_ctx=64).decode(ids, output="all")
    assert distance(got, expected) < 5e-5
    plain = run(directory, room / "plain.gguf", *arguments(room, [*PALU, "--group", "1"], 0.6))
    assert distance(session(plain, n_ctx=64).decode(ids, output="all"), expected) > 1e-3


def test_adapters_on_a_alone_leave_the_up_projections(tiny: Tiny, room: Path) -> None:
    directory = tiny()
    options = [*arguments(room, PALU, 0.6), *with_training(room, "--lora-on", "a")]
    work, plan = planned(directory, options)
    recipe = parse([str(directory), "-o", str(room / "out.gguf"), *options], "test")
    trained, _ = lora.train(recipe, work, plan)
    for (layer, side), bases in trained.items():
        chosen = plan.layers[layer].side(side)
        whole = work.bases(layer, side, chosen.group)
        for basis, before, rank in zip(bases, whole, chosen.ranks, strict=True):
            assert distance(basis.up, before.truncated(rank).up) < 1e-6
            down = before.truncated(rank).down.T @ work.weight(layer, side).astype(np.float64)
            assert basis.rows is not None
            assert distance(basis.rows, down) > 1e-4


def test_training_recovers_perplexity(demo: Path, room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On text that was not trained on, as the report says and as the runtime measures."""
    from latentkv.measure.perplexity import Cache, perplexity

    (room / "train.txt").write_text((demo / "sample-calib.txt").read_text(encoding="utf-8"))
    options = arguments(room, [*PALU, "--group", "all"], 0.25)
    before = run(demo, room / "before.gguf", *options)
    training = ["--finetune", str(room / "train.txt"), "--steps", "25", "--lr", "1e-3"]
    after = run(demo, room / "after.gguf", *options, *training)
    report = json.loads((room / "after.report.json").read_text())["finetune"]
    assert report["after"] < 0.97 * report["before"]
    text = (demo / "sample-val.txt").read_text(encoding="utf-8")[:8000]
    ppl = [
        perplexity(Cache(model, {"kv": "f32", "n_threads": 1}), text, n_ctx=256)["ppl"]
        for model in (before, after)
    ]
    assert ppl[1] < 0.99 * ppl[0]
    recipe = json.loads((room / "after.report.json").read_text())["recipe"]
    assert recipe["finetune"] == {
        "text": "train.txt", "steps": 25, "lora_rank": 32, "lr": 1e-3, "lora_on": "ab",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (["zack"], "expected K rebuild or absorbed, whose latent is A x; got K rotated"),
        (["none"], "expected a method that makes latents; got full K and V everywhere"),
    ],
)
def test_plans_without_trainable_factors_are_refused(
    method: list[str], message: str, tiny: Tiny, room: Path
) -> None:
    options = ["--method", "none"] if method == ["none"] else arguments(room, method, 0.6)
    with pytest.raises(ConvertError, match=rf"^\[--finetune\] {message}$"):
        run(tiny(), room / "out.gguf", *options, *with_training(room))
    assert not (room / "out.gguf").exists()


def test_keys_behind_a_norm_over_all_heads_have_no_trainable_factors(tiny: Tiny, room: Path) -> None:
    message = "expected K whose latent is A x; got a norm over all heads of K after its projection"
    with pytest.raises(ConvertError, match=rf"^\[--finetune\] {message}$"):
        run(tiny("olmo2"), room / "out.gguf", *arguments(room, PALU, 0.6), *with_training(room))
    assert not (room / "out.gguf").exists()


def test_a_short_text_and_stray_options_are_refused(
    tiny: Tiny, room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = arguments(room, PALU, 0.6)
    monkeypatch.setattr(lora, "WINDOW", 512)
    text = room / "short.txt"
    text.write_text(TEXT[:1200], encoding="utf-8")
    with pytest.raises(ConvertError, match=r"\[--finetune\] expected a text of at least 2555 tokens; got"):
        run(tiny(), room / "out.gguf", *options, "--finetune", str(text))
    with pytest.raises(ConvertError, match=r"^\[--lora-rank\] expected --finetune TEXT beside it; got none"):
        parse([str(room), "-o", str(room / "out.gguf"), *options, "--lora-rank", "4"], "test")
    with pytest.raises(
        LatentKVError, match=r"^\[--lr\] expected a learning rate above 0 and below 1; got 2$"
    ):
        parse([str(room), "-o", str(room / "out.gguf"), *options, "--lr", "2"], "test")


def test_a_loss_that_is_not_finite_ends_the_training(tiny: Tiny, room: Path) -> None:
    options = [*arguments(room, PALU, 0.6), "--finetune", str(room / "calib.txt"), "--steps", "5"]
    directory = tiny()
    work, plan = planned(directory, options)
    model = Decoder(work.source)
    factors = factored.install(model, work, plan)
    with torch.no_grad():
        factors[0, "k"].latent_a.weight.fill_(float("nan"))
    recipe = parse([str(directory), "-o", str(room / "out.gguf"), *options], "test")
    assert recipe.finetune is not None
    windows = torch.tensor([token_ids(64)] * 4)
    with pytest.raises(ConvertError, match=r"expected a finite loss; got nan at step 0; lower --lr"):
        lora.descend(
            lora.adapters(model, recipe.finetune), windows, recipe.finetune, np.random.default_rng(0)
        )
