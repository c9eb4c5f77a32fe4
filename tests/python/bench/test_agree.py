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
    assert all(cell["ok"] for cell in cells)
    assert all(cell["noise"] > 0 for cell in cells)


def test_a_cell_that_differs_is_off() -> None:
    noise = [[1e-6, 3e-6], [1e-6, 3e-6]]

    def of(kind: str, *klds: float) -> dict[str, object]:
        return {"model": "x", "kind": kind, "cells": {"24 1": [(kld, 24) for kld in klds]}, "noise": noise}

    found = [of("f32 rows", 1e-7, 2e-7), of("q8_0 rows", 1e-7, 3.4), of("q4_0 rows", 1e-7, 9e-6)]
    assert [row["ok"] for row in agree.judged(found)] == [True, False, False]


def test_one_token_may_be_as_far_off_as_any_that_was_seen() -> None:
    noise = [0.0] * 63 + [0.5]
    assert agree.allowed(2, 0.0, noise, 0.5) > 0.5 > 10 * agree.allowed(64, 0.0, noise, 0.5)


def test_what_flipped_at_one_depth_may_flip_at_another() -> None:
    noise = [[0.0, 1e-3], [0.0, 0.0]]
    rows = [
        {"model": "x", "kind": "f32 rows", "cells": {"9 1": [(1e-8, 9)] * 2}, "noise": noise},
        {"model": "x", "kind": "plan 14", "cells": {"9 1": [(1e-8, 9), (2e-5, 9)]}, "noise": noise},
    ]
    assert all(row["ok"] for row in agree.judged(rows))


def test_what_is_not_a_number_differs() -> None:
    alone = log_softmax(np.zeros((1, 8), np.float32)).reshape(-1).astype(np.float32)
    assert agree.divergence(np.full(8, np.nan, np.float32), alone) == float("inf")
    assert agree.divergence(np.ones(8, np.float32), alone) == pytest.approx(0.0, abs=1e-7)
