"""bench/lab/oscar.py: its rotations are orthogonal and lose nothing, its rows have two bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def rotated(converted: Any, demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    converted("--method", "none")  # skips where it cannot
    path = tmp_path_factory.mktemp("oscar") / "oscar.gguf"
    command = [sys.executable, str(ROOT / "bench/lab/oscar.py"), str(demo), "-o", str(path)]
    command += ["--calib", str(demo / "sample-calib.txt"), "--calib-tokens", "6144"]
    environment = os.environ | {"XDG_CACHE_HOME": str(path.parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return path


def divergence(path: Path, plain: Path, demo: Path, **options: Any) -> float:
    from latentkv import _core
    from latentkv.measure.perplexity import Cache, perplexity

    reference = Cache(_core.Model(str(plain)), {"kv": "f16", "n_threads": 1})
    text = (demo / "sample-val.txt").read_text(encoding="utf-8")
    cache = Cache(_core.Model(str(path)), options | {"n_threads": 1})
    kld: float = perplexity(cache, text, n_ctx=512, chunks=2, decode=True, against=reference)["kld"]["mean"]
    return kld


def test_rotations_lose_nothing_and_two_bits_do(rotated: Path, converted: Any, demo: Path) -> None:
    from latentkv import _core

    plain = converted("--method", "none")
    assert divergence(rotated, plain, demo, kv="f16") < 1e-4
    assert 1e-3 < divergence(rotated, plain, demo, sink=4, recent=32) < 0.1
    model = _core.Model(str(rotated))
    assert (model.regions["sink"], model.regions["recent"]) == (64, 256)
    sides = [layer[side] for layer in model.layers for side in ("k", "v")]
    assert {name for side in sides for names in side["formats"] for name in names} == {"q2"}
    assert {tuple(side["ranks"]) for side in sides} == {(64,) * 4}
