"""waterfill at its whole rank is the original model, from a checkpoint and from its stock GGUF: architectures
with norms, gates or routing of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from both import N, distance, expected_logits, run, session, step_by_step, token_ids
from gguf_files import plain

from conftest import Tiny

CASES = [
    ("afmoe", "size", True),
    ("afmoe", "speed", False),
    ("bailing_moe_v2", "speed", True),
    ("hunyuan_v1_dense", "size", True),
    ("hunyuan_v1_dense", "speed", False),
    ("hunyuan_v1_moe", "speed", True),
]


@pytest.mark.parametrize(("model_type", "prefer", "from_gguf"), CASES)
def test_logits_equal_transformers(
    model_type: str, prefer: str, from_gguf: bool, tiny: Tiny, tmp_path: Path, calib: Path
) -> None:
    checkpoint, ids = tiny(model_type), token_ids()
    expected = expected_logits(checkpoint, ids)
    source = plain(checkpoint, tmp_path / "stock.gguf") if from_gguf else checkpoint
    windows = ("--sink", "0", "--recent", "0", "--calib-tokens", "512", "--calib-window", "128", "--quick")
    options = ("--kv-budget", "16MiB@256", "--prefer", prefer, *windows, "--calib", str(calib))
    whole = run(source, tmp_path / "whole.gguf", *options)
    assert {layer["k"]["path"] for layer in whole.layers} == {"rebuild" if prefer == "size" else "rotated"}
    assert distance(session(whole).decode(ids, output="all"), expected) < 1e-3
    assert distance(step_by_step(whole, ids, N - 20), expected[N - 21 :]) < 1e-3
