"""Rows stored about their mean: the original model at full rank on every path, a constant in keys and values
costs no bits, and nothing changes where there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from both import N_CTX, core, distance, expected_logits, load, logits, run, session, step_by_step, token_ids
from test_matrix import arguments, planned

from conftest import Tiny, keys, tensors

N = 120
SIZE = 5e3  # of a constant, where keys and values themselves are of order 1

PATHS: list[tuple[str, dict[str, Any], list[str], str]] = [
    ("llama", {"attention_bias": True}, ["palu"], "rebuild"),
    ("qwen3", {}, ["palu", "--group", "all"], "rebuild"),
    ("olmo2", {}, ["palu", "--group", "1"], "rebuild"),
    ("phi3", {"original_max_position_embeddings": 64}, ["eigen"], "rebuild"),
    ("opt", {}, ["palu", "--k-path", "rebuild"], "rebuild"),
    ("opt", {}, ["palu"], "absorbed"),
    ("mpt", {}, ["eigen"], "absorbed"),
    ("opt", {}, ["zack", "--allocate", "uniform"], "absorbed"),
    ("opt", {}, ["zack", "--k-path", "rotated", "--allocate", "uniform"], "rotated"),
    ("llama", {"attention_bias": True}, ["zack", "--allocate", "uniform"], "rotated"),
]


def divergence(exact: np.ndarray, got: np.ndarray) -> float:
    """Mean KL divergence in nats per token."""
    p, q = (torch.from_numpy(each).double().log_softmax(-1) for each in (exact, got))
    return reference.divergence(p, q)


def with_constants(directory: Path, sides: str, size: float) -> Path:
    """The checkpoint with a constant of this size in K or V, which the projection makes from its input."""
    model = load(directory)
    torch.manual_seed(1)
    with torch.no_grad():
        for layer in model.model.decoder.layers:
            norm, attention = layer.self_attn_layer_norm, layer.self_attn
            norm.weight[0], norm.bias[0] = 0.0, 1.0  # one input channel is the same for every token
            attention.q_proj.weight[:, 0] = 0.0
            for side in sides:
                weight = getattr(attention, f"{side}_proj").weight
                weight[:, 0] = size * torch.randn(weight.shape[0])
                if side == "v":  # it must not drown the residual stream
                    attention.out_proj.bias -= attention.out_proj.weight @ weight[:, 0]
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize(("model", "config", "method", "path"), PATHS)
def test_full_rank_is_the_original_and_cut_is_what_torch_computes(
    model: str, config: dict[str, Any], method: list[str], path: str, tiny: Tiny, room: Path, always: None
) -> None:
    directory, ids = tiny(model, **config), token_ids(N)
    original = load(directory)
    exact = logits(original, ids)
    whole = run(directory, room / "whole.gguf", *arguments(room, method, 1.0))
    assert {layer["k"]["path"] for layer in whole.layers} == {path}
    stored = tensors(room / "whole.gguf")
    assert np.linalg.norm(stored["blk.0.attn_v_a.bias"]) > 0
    form = "e" if model == "olmo2" else "a"
    assert (f"blk.0.attn_k_{form}.bias" in stored) == (path in ("rebuild", "absorbed"))
    assert distance(session(whole).decode(ids, output="all"), exact) < 5e-5

    options = arguments(room, method, 0.6)
    cut = run(directory, room / "cut.gguf", *options)
    with reference.compressed(original, *planned(directory, options)) as truncated:
        expected = logits(truncated, ids)
    assert distance(expected, exact) > 0.05
    assert distance(session(cut).decode(ids, output="all"), expected) < 5e-5
    assert distance(step_by_step(cut, ids, N - 10), expected[N - 11 :]) < 5e-5


@pytest.mark.parametrize("model", ["opt", "mpt"])
def test_whole_keys_are_centred_too(model: str, tiny: Tiny, room: Path, always: None) -> None:
    """tale keeps K whole: without RoPE its bias takes the mean away, and the scores stay what they were."""
    directory, ids = tiny(model), token_ids(N)
    exact = expected_logits(directory, ids)
    recipe = arguments(room, ["tale", "--prefill", "eager"], 1.0)
    whole = run(directory, room / "whole.gguf", *recipe)
    work, _ = planned(directory, recipe)
    stored = tensors(room / "whole.gguf")
    assert distance(stored["blk.1.attn_k.bias"], -reference.mean(work, 1, "k").astype(np.float32)) < 1e-6
    assert distance(session(whole).decode(ids, output="all"), exact) < 5e-5


METHODS = [
    ("kv", ["palu", "--group", "all", "--keep", "1"]),
    ("kv", ["palu", "--group", "1", "--keep", "1"]),
    ("kv", ["palu", "--k-path", "rebuild", "--keep", "1"]),
    ("k", ["palu", "--group", "all", "--keep", "1"]),
    ("v", ["palu", "--group", "all", "--keep", "1"]),
    ("kv", ["zack", "--keep", "1", "--allocate", "uniform"]),
    ("kv", ["eigen", "--keep", "1", "--allocate", "uniform"]),
    ("kv", ["zack", "--k-path", "rotated", "--keep", "1", "--allocate", "uniform"]),
]


@pytest.mark.parametrize(("sides", "method"), METHODS)
def test_a_constant_costs_no_bits(sides: str, method: list[str], tiny: Tiny, room: Path) -> None:
    directory, ids = with_constants(tiny("opt"), sides, SIZE), token_ids(N)
    exact = expected_logits(directory, ids)
    error = {}
    for flag in ("--center", "--no-center"):
        options = ["--method", *method, "--calib", str(room / "calib.txt"), "--calib-window", "128"]
        model = run(directory, room / f"{flag}.gguf", *options, "--allocate", "uniform", flag)
        live = core.Session(model, n_ctx=N_CTX, n_threads=1, kv="q4")
        error[flag] = divergence(exact, live.decode(ids, output="all"))
    assert 9 * error["--center"] < error["--no-center"]  # 9.5 to 30, by method


def test_a_planned_cache_has_no_constant_to_pay_for(tiny: Tiny, room: Path) -> None:
    directory, ids = with_constants(tiny("opt"), "kv", SIZE), token_ids(N)
    exact = expected_logits(directory, ids)
    options = ["--calib", str(room / "calib.txt"), "--calib-window", "128", "--recent", "16"]
    error, forecast = {}, {}
    for flag in ("--center", "--no-center"):
        model = run(directory, room / f"{flag}.gguf", *options, "--kv-budget", "60%", flag)
        live = core.Session(model, n_ctx=N_CTX, n_threads=1)
        error[flag] = divergence(exact, live.decode(ids, output="all"))
        forecast[flag] = keys(room / f"{flag}.gguf")["latentkv.predicted_kld"]
    assert 100 * error["--center"] < error["--no-center"]
    assert 20 * forecast["--center"] < forecast["--no-center"]


def test_without_a_constant_nothing_changes(demo: Path, room: Path) -> None:
    """A model of the llama family: tensors and keys bit for bit those of --no-center."""
    found = {}
    for flag in ("--center", "--no-center"):
        run(demo, room / f"{flag}.gguf", *arguments(room, ["palu", "--allocate", "uniform"], 0.5), flag)
        report = json.loads((room / f"{flag}.report.json").read_text())
        assert not [layer for layer in report["layers"] for side in "kv" if "centred" in layer[side]]
        recipe = {"latentkv.source.recipe", "general.name"}
        kept = {name: value for name, value in keys(room / f"{flag}.gguf").items() if name not in recipe}
        found[flag] = kept, tensors(room / f"{flag}.gguf")
    assert found["--center"][0] == found["--no-center"][0]
    assert found["--center"][1].keys() == found["--no-center"][1].keys()
    for name, array in found["--center"][1].items():
        assert np.array_equal(array, found["--no-center"][1][name]), name


def test_the_report_says_what_is_centred(tiny: Tiny, room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from latentkv_convert.cli import main

    directory = with_constants(tiny("opt"), "k", SIZE)
    options = arguments(room, ["palu", "--allocate", "uniform"], 0.5)
    assert main([str(directory), "-o", str(room / "out.gguf"), "--no-plot", *options]) == 0
    layers = json.loads((room / "out.report.json").read_text())["layers"]
    assert all(layer["k"]["centred"] for layer in layers)
    assert "stored about their mean: K of layer 0 1" in capsys.readouterr().out
