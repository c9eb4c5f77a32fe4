"""Eviction in other architectures: windows, attention sinks, ALiBi, soft caps, norms of K."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from both import core, distance, run, token_ids

from conftest import Tiny

IDS = token_ids(240)
CALIBRATED = ("--calib-tokens", "1024", "--calib-window", "128")
METHODS: dict[str, tuple[str, ...]] = {
    "full": ("--method", "none"),
    "zack": ("--method", "zack", "--keep", "0.5", *CALIBRATED),
    "palu": ("--method", "palu", "--keep", "0.5", "--allocate", "uniform", *CALIBRATED),
}


def decoded(model: Any, implementation: str, **options: Any) -> np.ndarray:
    regions = {"sink": 4, "recent": 0, "keep_tokens": "80", "n_ubatch": 16, "n_ctx": 1024}
    s = core.Session(
        model, n_threads=2, kv="f32", implementation=implementation, **({"evict": "h2o"} | regions | options)
    )
    parts = [s.decode(IDS[:200], output="all")]
    return np.concatenate(parts + [s.decode([token]) for token in IDS[200:]])


def test_windows_alone_have_nothing_to_give_up(random_checkpoint: Tiny, tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tmp_path / "checkpoint", "mistral", sliding_window=48)
    model = run(checkpoint, tmp_path / "model.gguf", "--method", "none")
    with pytest.raises(ValueError, match=r"\[evict\] expected a layer that holds the context; got sliding"):
        decoded(model, "fused")


@pytest.mark.parametrize(
    ("architecture", "method"),
    [
        ("gemma3_text", "full"),
        ("gemma3_text", "palu"),
        ("gemma2", "full"),
        ("gpt_oss", "full"),
        ("mpt", "zack"),
        ("qwen3", "palu"),
        ("qwen2", "full"),
    ],
)
def test_fused_masses_choose_as_stock_operations_do(
    random_checkpoint: Tiny, tmp_path: Path, architecture: str, method: str
) -> None:
    checkpoint = random_checkpoint(tmp_path / "checkpoint", architecture)
    text = tmp_path / "calib.txt"
    text.write_bytes(bytes(np.random.default_rng(5).integers(32, 127, 6000, dtype=np.uint8)))
    calibration = () if method == "full" else ("--calib", str(text))
    model = run(checkpoint, tmp_path / "model.gguf", *METHODS[method], *calibration)
    for options in ({}, {"evict": "keyformer"}):
        fused, stock = (decoded(model, name, **options) for name in ("fused", "reference"))
        assert distance(fused, stock) < 1e-3
    whole = decoded(model, "fused", evict="none", keep_tokens="")
    assert distance(fused[150:], whole[150:]) > 1e-2
