"""What terminals get, and that pipes get none of it."""

from __future__ import annotations

import io
import re
import sys
from typing import Any

import pytest
from rich.table import Table

from latentkv.console import progress, terminal


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")


def wide() -> Table:
    header = ["kv", "bytes/token", *(f"cache at {1 << n}" for n in range(10, 17)), "sum"]
    return terminal.table(header, [["q4 [dim]", "1100.0", *["17.2 MiB"] * 7, "90.1 MiB"]])


def shown(monkeypatch: pytest.MonkeyPatch, out: io.StringIO, *blocks: terminal.Block) -> str:
    monkeypatch.setattr("sys.stdout", out)
    terminal.show(*blocks)
    return out.getvalue()


def test_a_table_in_a_pipe() -> None:
    made = terminal.table(["a", "n"], [["x", "1"], ["yy", "22"]])
    assert terminal.plain(made).splitlines() == ["a    n", "--  --", "x    1", "yy  22"]
    bare = terminal.table(["", "long name"], [["1", "[2]"]], left=0, rule=False)
    assert terminal.plain(bare).splitlines() == ["   long name", "1        [2]"]


def test_a_pipe_gets_whole_lines_without_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = shown(monkeypatch, io.StringIO(), "long " * 40, wide())
    assert "\x1b" not in text
    assert text.splitlines()[0] == "long " * 40
    assert len(text.splitlines()) == 4
    assert "cache at 65536" in text
    assert "q4 [dim]" in text


def test_a_terminal_gets_a_table_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    made = terminal.table(
        ["kv", "bytes/token", "of f16", *(f"cache at {n}" for n in (4096, 16384, 65536)), "compute", "sum"],
        [["q4", "1100.0", "13.4 %", "4.30 MiB", "17.2 MiB", "68.8 MiB", "5.13 MiB", "90.1 MiB"]],
    )
    monkeypatch.setenv("NO_COLOR", "1")
    text = shown(monkeypatch, Screen(), made)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    for whole in ("bytes/token", "1100.0", "4.30 MiB", "17.2 MiB", "65536", "90.1 MiB"):
        assert whole in text
    monkeypatch.delenv("NO_COLOR")
    assert "\x1b[1m" in shown(monkeypatch, Screen(), made)
    monkeypatch.setenv("TERM", "dumb")
    assert shown(monkeypatch, Screen(), made) == terminal.plain(made) + "\n"


@pytest.mark.parametrize(
    ("environment", "color", "styled"),
    [
        ({}, "auto", True),
        ({"NO_COLOR": "1"}, "auto", False),
        ({"NO_COLOR": ""}, "auto", True),
        ({"TERM": "dumb"}, "auto", False),
        ({}, "never", False),
        ({"NO_COLOR": "1"}, "always", True),
    ],
)
def test_who_decides_on_colors(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], color: str, styled: bool
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (terminal.console(Screen(), color).color_system is not None) == styled
    assert (terminal.console(io.StringIO(), color).color_system is not None) == (color == "always")


def bar(monkeypatch: pytest.MonkeyPatch, **environment: str) -> Any:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stderr", Screen())
    return progress.stage(8, "calibrate [x]", "window")


def test_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "_REDRAW", 0.0)
    opened, screen = bar(monkeypatch, NO_COLOR="1"), sys.stderr
    with opened as drawn:
        drawn.note("loss 2.345")
        drawn.update(2)
        drawn.reach(5.5)
        print("an answer")
        print("a warning", file=sys.stderr)
    text = screen.getvalue()  # type: ignore[attr-defined]
    for part in ("calibrate [x] ━", " 2/8 windows ", " 5/8 windows ", " loss 2.345", "a warning\n"):
        assert part in text
    lines = re.sub(r"\x1b\[[?\d]*[a-zA-Z]", "", text).replace("\r", "\n").splitlines()
    assert max(map(len, lines)) <= 78
    assert text.endswith("\x1b[2K")  # and it is gone
    assert capsys.readouterr().out == "an answer\n"


def test_a_stage_that_is_counted_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_REDRAW", 0.0)
    with bar(monkeypatch) as drawn:
        drawn.total = 4
        drawn.reach(1)
        assert drawn._drawn.tasks[0].total == 4


def test_a_dumb_terminal_has_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(bar(monkeypatch, TERM="dumb"), progress.Lines)
