"""Weights in Q4_0, by instructions of their own on some processors: many tokens are as one by one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A process of its own, since what went wrong once was a segmentation fault.
RUN = """
import sys
import numpy as np
from latentkv import _core
model = _core.Model(sys.argv[1])
ids = [i * 37 % model.n_vocab for i in range(40)]
together = _core.Session(model, n_ctx=64, kv="f32").decode(ids, output="last")
session = _core.Session(model, n_ctx=64, kv="f32")
for token in ids:
    alone = session.decode([token], output="last")
print(np.linalg.norm(np.subtract(together, alone)) / np.linalg.norm(alone))
"""


def test_many_tokens_at_once_are_as_one_by_one(tmp_path: Path) -> None:
    pytest.importorskip("latentkv._core")
    path = tmp_path / "tiny.gguf"
    write = [sys.executable, str(ROOT / "bench/inputs/random_model.py"), "tiny", str(path)]
    subprocess.run(write, check=True, capture_output=True)
    run = subprocess.run([sys.executable, "-c", RUN, str(path)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    # rows of inputs are rounded to 8 bits either way
    assert float(run.stdout) < 0.02
