"""Weights that memory holds in f32 are those of a file that has them so: no input is rounded to 8 bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from both import core, distance, session, token_ids
from gguf_files import plain
from test_stock_layouts import with_factors

from conftest import Tiny
from latentkv_convert.cli import main

N = 60


PALU = ("--method", "palu", "--keep", "0.5", "--calib-tokens", "512", "--calib-window", "64")


def logits(path: Path, **where: str) -> np.ndarray:
    found: np.ndarray = session(core.Model(str(path), **where)).decode(token_ids(N), output="all")
    return found


def encoded(source: Path, out: Path, outtype: str, *options: str) -> Path:
    assert main([str(source), "-o", str(out), "--outtype", outtype, *(options or ("--method", "none"))]) == 0
    return out


# tied output, experts, a shared one, recurrent layers of both kinds, MLA, numbers that tokens bring to layers
@pytest.mark.parametrize(
    "model_type",
    ["qwen3", "gemma3_text", "qwen3_5_moe", "nemotron_h_moe", "glm4_moe_lite", "gemma4"],
)
def test_weights_in_memory_equal_those_of_a_file(model_type: str, tiny: Tiny, tmp_path: Path) -> None:
    q8 = encoded(tiny(model_type), tmp_path / "q8.gguf", "q8_0")
    expected = logits(encoded(q8, tmp_path / "f32.gguf", "f32"))
    stored = distance(logits(q8), expected)
    assert stored > 3e-4  # what is left out
    assert distance(logits(q8, weights="f32"), expected) < 1e-5
    assert distance(logits(q8, weights="f16"), expected) < stored


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_5_moe"])
def test_factors_of_weights_stay_theirs(model_type: str, tiny: Tiny, tmp_path: Path) -> None:
    """NVFP4's, by which products are multiplied."""
    stock, _ = with_factors(plain(tiny(model_type), tmp_path / "usual.gguf"), tmp_path / "stock.gguf")
    expected = logits(stock)
    assert distance(logits(stock, weights="f32"), expected) == 0


def test_latents_and_sidecars(tiny: Tiny, calib: Path, tmp_path: Path) -> None:
    """Factors of a converted file and the weights of a sidecar's base."""
    q8 = plain(tiny("qwen3"), tmp_path / "q8.gguf", "q8_0")
    options = (*PALU, "--calib", str(calib), "--factor-type", "f32")
    paths = {name: tmp_path / f"{name}.gguf" for name in ("f32", "whole", "exact", "side")}
    encoded(q8, paths["f32"], "f32")
    for source, out, more in ((q8, "whole", ()), (paths["f32"], "exact", ()), (q8, "side", ("--sidecar",))):
        assert main([str(source), "-o", str(paths[out]), *options, *more]) == 0
    expected = logits(paths["exact"], weights="f32")
    assert distance(logits(paths["whole"]), expected) > 3e-4
    assert distance(logits(paths["whole"], weights="f32"), expected) < 1e-5
    assert distance(logits(q8, latent_path=str(paths["side"]), weights="f32"), expected) < 1e-5
