"""--polish: training lowers what a plan loses, and the file holds the factors that did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from both import run

from conftest import Tiny, tensors
from latentkv_convert.cli import main
from latentkv_convert.recover import polish

OPTIONS = ["--kv-budget", "25%", "--calib-window", "128", "--fisher-tokens", "1024", "--recent", "16"]


@pytest.mark.parametrize("options", [["--scales", "row"], ["--prefer", "size", "--segment", "32"]])
def test_training_lowers_the_loss(
    options: list[str], tiny: Tiny, calib: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = polish.texts

    def same(*args: Any) -> tuple[Any, list[Any]]:
        """Factors are judged by what they learn from: a text of 3000 tokens has too few for another one."""
        windows, _ = texts(*args)
        return windows, [windows]

    monkeypatch.setattr(polish, "texts", same)
    monkeypatch.setattr(polish, "STEP", 3e-4)
    monkeypatch.setattr(polish, "CHECKS", 1)
    words = [*OPTIONS, *options, "--calib", str(calib)]
    directory = tiny(num_hidden_layers=2)
    paths = [tmp_path / name for name in ("plain.gguf", "polished.gguf")]
    for path, steps in zip(paths, ("0", "6"), strict=True):
        run(directory, path, *words, "--polish", steps)
    plain, polished = (json.loads(path.with_suffix(".report.json").read_text())["cache"] for path in paths)
    assert "polished" not in plain
    found = polished["polished"]
    assert (found["steps"], found["kept"]) == (6, 6)
    assert found["after"][0] < 0.95 * found["before"][0]
    before, after = map(tensors, paths)
    changed = {name for name in after if not np.array_equal(before[name], after[name])}
    factors = ("k_e", "q_e", "v_e", "v_b") if "row" in options else ("k_e", "k_b", "v_e", "v_b")
    assert changed == {f"blk.{layer}.attn_{name}.weight" for layer in range(2) for name in factors}


@pytest.mark.parametrize(
    ("words", "message"), [(["--polish", "-1"], "polish"), (["--polish", "2", "--master"], "master")]
)
def test_what_cannot_be_polished(
    words: list[str], message: str, demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main([str(demo), "-o", str(tmp_path / "out.gguf"), *words])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not list(tmp_path.glob("out*"))
