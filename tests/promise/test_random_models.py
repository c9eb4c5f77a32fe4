"""Models of random weights that speed is measured with: every family and cache opens and runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

_core = pytest.importorskip("latentkv._core")
random_model = pytest.importorskip("inputs.random_model")


@pytest.mark.parametrize("name", ["8b", "qwen38-27b", "gemma4-31b"])
@pytest.mark.parametrize("prefer", ["", "speed", "size", "one-row"])
def test_a_shape_runs(name: str, prefer: str, tmp_path: Path) -> None:
    whole = random_model.SHAPES[name]
    shape = replace(whole, n_layer=whole.period, n_embd=256, n_ff=256, n_vocab=300)
    full = random_model.sides_of("full/full", shape)
    sides = random_model.planned("14", prefer, shape, 2) if prefer else full
    random_model.write(shape, tmp_path / "model.gguf", sides, "small", 1)
    model = _core.Model(str(tmp_path / "model.gguf"))
    session = _core.Session(model, n_ctx=256)
    logits = session.decode(list(range(170)), output="last")
    assert np.isfinite(logits).all()
    per_token, f16 = (session.kv_bytes()[key] for key in ("per_token", "f16_per_token"))
    assert (per_token < 0.2 * f16) == bool(prefer)
