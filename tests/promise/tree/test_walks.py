"""The walks of ARCHITECTURE.md name files that exist, each once, and say how many these are and how long."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
WALKS = {"token": "native/src", "weight": "tools/convert/latentkv_convert"}  # walk -> where short paths begin
COUNTS = re.compile(r"in (\d+) files and ([\d,]+) lines:")
SLACK = 0.1  # of the lines, so that not every change of a file is one of the page


def section(walk: str) -> str:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    return page.partition(f"## Follow one {walk}\n")[2].partition("\n## ")[0]


def named(walk: str) -> list[Path]:
    table = re.search(r"^\| files, [^\n]*\n\|[-| ]+\n((?:\|[^\n]*\n)+)", section(walk), re.MULTILINE)
    assert table is not None, f"no table of files under 'Follow one {walk}'"
    names = [name for row in table[1].splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[1])]
    roots = ("native/", "python/")
    return [ROOT / name if name.startswith(roots) else ROOT / WALKS[walk] / name for name in names]


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_names_files_and_counts_them(walk: str) -> None:
    files = named(walk)
    assert not [str(path) for path in files if not path.is_file()]
    assert len(set(files)) == len(files)
    counts = COUNTS.search(section(walk))
    assert counts is not None
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    assert int(counts[1]) == len(files)
    assert int(counts[2].replace(",", "")) == pytest.approx(lines, rel=SLACK)
