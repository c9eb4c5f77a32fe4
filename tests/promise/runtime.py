"""What the runtime tests share: token ids of real text, sessions, and the one way to compare logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

DEMO = Path(__file__).resolve().parents[2] / "models/demo"
SAMPLE = DEMO / "sample-val.txt"
# The default budget on little text, for every test that needs a file with a plan.
WATERFILL = ("--method", "waterfill", "--fisher-tokens", "4096", "--calib-window", "512", "--outtype", "f32")

Logits = NDArray[np.float32]


def model(path: Path) -> Any:
    from latentkv import _core

    return _core.Model(str(path))


def session(model: Any, **options: Any) -> Any:
    from latentkv import _core

    return _core.Session(model, **({"n_ctx": 512, "n_threads": 1} | options))


def tokens(model: Any, n: int) -> list[int]:
    ids: list[int] = model.tokenize(SAMPLE.read_bytes(), True, False)
    assert len(ids) >= n
    return ids[:n]


def distance(got: NDArray[Any], expected: NDArray[Any]) -> float:
    """Relative norm of the difference, in float64. NaN never passes a `<`."""
    assert got.shape == expected.shape
    difference = np.linalg.norm(got.astype(np.float64) - expected.astype(np.float64))
    return float(difference / np.linalg.norm(expected.astype(np.float64)))
