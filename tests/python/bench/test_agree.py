"""bench/gpu/agree.py on the CPU, whose sequences agree, and what it says of some that do not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from gpu import agree
from latentkv.sampling.logprobs import log_softmax


def test_sequences_agree_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        "--device",
        "cpu",
        "--models",
        "tiny-mla",
        "--sequences",
        "1,3",
        "--pieces",
        "1,17",
        "--jobs",
        "1",
    ]
    words += ["--kinds", "plan 14", "--work", str(tmp_path), "--out", str(tmp_path / "agree.json")]
    monkeypatch.setattr(sys, "argv", ["agree.py", *words])
    assert agree.main() == 0
    cells = json.loads((tmp_path / "agree.json").read_text())["cells"]
    at = [(cell["kind"], cell["sequences"], cell["piece"]) for cell in cells]
    assert at == [(kind, n, piece) for kind in ("f32 rows", "plan 14") for n in (1, 3) for piece in (1, 17)]
    assert all(cell["ok"] and cell["kld"] <= cell["allowed"] for cell in cells)


def test_a_cell_that_differs_is_off(tmp_path: Path) -> None:
    alone = log_softmax(np.random.default_rng(1).standard_normal((4, 64))).astype(np.float32)
    for kind in ("f32 rows", "q8_0 rows"):
        np.save(tmp_path / f"alone-x-{kind}.npy", alone)
    found = [
        {"model": "x", "kind": "f32 rows", "cells": {"24 1": [1e-7, 2e-7]}},
        {"model": "x", "kind": "q8_0 rows", "cells": {"24 1": [1e-7, 3.4]}},
    ]
    assert [row["ok"] for row in agree.judged(found, tmp_path)] == [True, False]


def test_what_is_not_a_number_differs() -> None:
    alone = log_softmax(np.zeros((1, 8), np.float32)).reshape(-1).astype(np.float32)
    assert agree.divergence(np.full(8, np.nan, np.float32), alone) == float("inf")
    assert agree.divergence(np.ones(8, np.float32), alone) == pytest.approx(0.0, abs=1e-7)
