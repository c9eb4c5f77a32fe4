"""Layers whose factors are larger than what they save keep full rows, and nothing is left of the budget."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from both import core, run

from conftest import Tiny, keys, tensors
from latentkv_convert import calibrate
from latentkv_convert.fuse.rotation import turn
from latentkv_convert.plan import forecast
from latentkv_convert.source import archs
from latentkv_convert.source.checkpoint_source import CheckpointSource

N_CTX = 1024
WINDOWED = (0, 2)  # layers of gemma3_text's TINY with a window of 48 tokens


@pytest.fixture(scope="module")
def windowed(random_checkpoint: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model with sliding windows, and a text."""
    text = tmp_path_factory.mktemp("calib") / "calib.txt"
    text.write_bytes(bytes(np.random.default_rng(5).integers(32, 127, 20000, dtype=np.uint8)))
    folder = tmp_path_factory.mktemp("gemma")
    return random_checkpoint(folder, "gemma3_text", max_position_embeddings=N_CTX), text


def converted(windowed: tuple[Path, Path], path: Path, *more: str) -> tuple[Any, dict[str, Any]]:
    checkpoint, text = windowed
    words = ["--calib", str(text), "--calib-window", "128", "--fisher-tokens", "2048", "--recent", "16"]
    model = run(checkpoint, path, *words, "--kv-budget", f"190KiB@{N_CTX}", *more)
    return model, json.loads(path.with_suffix(".report.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("prefer", ["speed", "size"])
@pytest.mark.parametrize("scales", ["row", "segment"])
def test_windowed_layers_have_no_factors(
    prefer: str, scales: str, windowed: tuple[Path, Path], tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    model, report = converted(windowed, path, "--prefer", prefer, "--scales", scales)
    for index, layer in enumerate(model.layers):
        for side in "kv":
            formats = {name for names in layer[side]["formats"] for name in names}
            assert (layer[side]["path"] == "full") == (index in WINDOWED)
            assert index not in WINDOWED or len(formats) == 1
    assert not any(f"blk.{index}.attn_v_b.weight" in tensors(path) for index in WINDOWED)
    assert model.forecast(32768)["total"] == report["cache"]["bytes"]
    assert 0.9 < (model.forecast(N_CTX)["total"] + report["added_weight_bytes"]) / (190 << 10) <= 1


@pytest.mark.parametrize("prefer", ["speed", "size"])
def test_the_forecast_is_what_decoding_measures(
    prefer: str, windowed: tuple[Path, Path], tmp_path: Path
) -> None:
    checkpoint, text = windowed
    path = tmp_path / "m.gguf"
    model, _ = converted(windowed, path, "--prefer", prefer)
    plain = run(checkpoint, tmp_path / "plain.gguf", "--method", "none")
    encoded = calibrate.encode(text.read_text("utf-8"), CheckpointSource(checkpoint))
    seen = []
    for window in forecast.held_back(calibrate.Sample.draw(encoded, 2048, 128, 0, deep=256)):
        logs = []
        for each, kv in ((plain, {"kv": "f32"}), (model, {})):
            live = core.Session(each, n_ctx=256, n_threads=1, n_ubatch=1, implementation="reference", **kv)
            logits = torch.from_numpy(live.decode(window.tolist(), output="all"))
            logs.append(logits[len(window) // 2 : -1].double().log_softmax(-1))
        seen.append(reference.divergence(*logs))
    assert abs(np.mean(seen) / keys(path)["latentkv.predicted_kld"] - 1) < 0.08


def test_masters_have_latents(windowed: tuple[Path, Path], tmp_path: Path) -> None:
    """Their factors are in no budget."""
    model, _ = converted(windowed, tmp_path / "m.gguf", "--master")
    assert {layer[side]["path"] for layer in model.layers for side in "kv"} == {"rotated", "latent"}


def test_rows_are_turned_as_the_runtime_turns_them() -> None:
    spec = dataclasses.replace(archs.model_spec(archs.tiny("llama")), head_dim=96)
    for side, block in (("k", 32), ("v", 32)):
        matrix = turn(spec, 0, side)
        assert np.allclose(matrix @ matrix, np.eye(96))
        assert np.count_nonzero(matrix) == 96 * block
    wide = dataclasses.replace(spec, head_dim=128)
    assert np.count_nonzero(turn(wide, 0, "k")) == 128 * 128
    assert np.count_nonzero(turn(wide, 0, "v")) == 128 * 64
