"""A GGUF in parts (llama.cpp's split) runs as the whole one does, or is refused in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from both import core, session, token_ids
from gguf_files import plain, rewritten

from conftest import Tiny
from latentkv_convert.cli import main
from latentkv_convert.source.gguf_file import GgufFile


@pytest.fixture
def parts(tiny: Tiny, tmp_path: Path) -> list[Path]:
    whole = plain(tiny(), tmp_path / "whole.gguf")
    rewritten(whole, tmp_path / "model.gguf", per_part=14)
    return sorted(tmp_path.glob("model-*-of-*.gguf"))


def refusal(path: Path) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "latentkv", "info", str(path)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert not run.stdout
    return run.stderr


def test_any_part_opens_the_whole_model(parts: list[Path]) -> None:
    ids = token_ids(40)
    whole = core.Model(str(parts[0].with_name("whole.gguf")))
    expected = session(whole).decode(ids, output="all")
    assert len(parts) > 2
    for path in parts:
        model = core.Model(str(path))
        assert model.n_params == whole.n_params
        np.testing.assert_array_equal(session(model).decode(ids, output="all"), expected)


def test_what_is_not_a_whole_set_is_refused_in_one_line(parts: list[Path]) -> None:
    n = len(parts)
    bytes_of = [path.read_bytes() for path in parts]
    parts[1].unlink()
    missing = refusal(parts[0])
    assert missing.startswith(f"error: [gguf] expected all {n} parts of '")
    assert "; got no '" in missing
    assert missing.count("\n") == 1
    parts[1].write_bytes(bytes_of[2])
    parts[2].write_bytes(bytes_of[1])
    assert refusal(parts[0]).startswith("error: [gguf] expected split.no 1; got 2 in '")
    alone = parts[0].with_name("alone.gguf")
    alone.write_bytes(bytes_of[0])
    wanted = f"expected {n} parts, as split.count says, NAME-00001-of-0000{n}.gguf and so on; got 1 in '"
    assert refusal(alone).startswith(f"error: [gguf] {wanted}")


@pytest.mark.parametrize(
    "name", ["whole-00001-of-00002.gguf", "whole-00002-of-00003.gguf", "whole-00001-of-00001.gguf"]
)
def test_a_whole_file_with_the_name_of_a_part(name: str, tiny: Tiny, tmp_path: Path) -> None:
    """Whether it says that it is one part, or nothing; converted, and run."""
    whole = plain(tiny(), tmp_path / "whole.gguf")
    for keys in ({}, {"split.count": 1}, {"split.count": 0}):
        renamed = rewritten(whole, tmp_path / "made.gguf", keys=keys).rename(tmp_path / name)
        assert core.Model(str(renamed)).n_params == core.Model(str(whole)).n_params
        out = tmp_path / "out.gguf"
        assert main([str(renamed), "-o", str(out), "--method", "none"]) == 0
        assert "split.count" not in GgufFile(out).values
