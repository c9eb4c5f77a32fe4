"""bench/record.py and curves.py: finished rows are kept, curves are frontiers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import curves
import record


def test_rows_of_the_same_command_are_kept(tmp_path: Path) -> None:
    path, command = tmp_path / "x.json", "python bench/ladder.py models/demo"
    assert record.finished(path, command, False) == []
    path.write_text(json.dumps({"command": command, "rows": [{"kv": "q4"}]}))
    assert record.finished(path, command, False) == [{"kv": "q4"}]
    assert record.finished(path, command, True) == []
    with pytest.raises(
        SystemExit, match=r"error: \[--save\] expected results of `python bench/ladder.py models/demo -c 64"
    ):
        record.finished(path, f"{command} -c 64", False)


def test_a_path_is_shown_as_a_reader_types_it(tmp_path: Path) -> None:
    assert record.shown(record.ROOT / "models" / "demo") == "models/demo"
    assert record.shown(tmp_path / "val.txt") == "val.txt"


def test_a_curve_leaves_out_what_is_beaten(tmp_path: Path) -> None:
    assert curves.frontier([(30, 0.1), (10, 0.5), (20, 0.6)]) == [(10, 0.5), (30, 0.1)]
    rows = [
        {"method": curves.FULL, "share": 1.0, "kld": 0.0},
        {"method": curves.FULL, "share": 0.3, "kld": 0.02},
        {"method": "palu", "share": 0.2, "kld": 0.03},
        {"method": "palu", "share": None, "kld": None},
    ]
    curves.draw(rows, tmp_path / "x.png", "title")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["x.png"]


def test_between_two_formats_there_is_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    lines: list[str] = []
    plot = Axes.plot

    def noted(axis: Axes, *args: object, label: str = "", **options: object) -> object:
        lines.append(label)
        return plot(axis, *args, label=label, **options)

    monkeypatch.setattr(Axes, "plot", noted)
    for name in ("divergence-f16-qwen-coder", "ladder-smollm2"):
        monkeypatch.setattr(sys, "argv", ["", name, "--gib", "131072", "--out", str(tmp_path / "x.png")])
        assert curves.main() == 0
    assert {"converted", "waterfill, speed"} <= set(lines)
    assert not {*lines} & {*curves.FORMATS}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no-such-result", "expected one no-such-result.json below bench/results; got 0"),
        ("serving-load", "expected a result with columns cache, share, kld"),
    ],
)
def test_a_curve_of_something_else_is_refused_in_a_line(
    name: str, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["curves.py", name])
    assert curves.main() == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: [NAME] {why}")
    assert said.count("\n") == 1


def test_a_curve_of_a_result_names_its_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "argv", ["curves.py", "divergence-f16-qwen-coder", "--out", str(tmp_path / "x.png")]
    )
    assert curves.main() == 0
    assert (tmp_path / "x.png").stat().st_size > 10000
