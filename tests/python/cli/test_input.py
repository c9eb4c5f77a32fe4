"""What is typed in `latentkv chat`: keys of the line editor, its history, and plain lines without it."""

from __future__ import annotations

import io
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from latentkv.cli import _input
from latentkv.cli._console import Console

COMMANDS = {
    "/reset": _input.Command(lambda rest: None, "", "forget the conversation"),
    "/regen": _input.Command(lambda rest: None, "", "answer the last question again"),
    "/save": _input.Command(lambda rest: None, "FILE", "save the conversation with its cache"),
}
ENTER, ALT_ENTER, CTRL_C, CTRL_D = "\r", "\x1b\r", "\x03", "\x04"


@pytest.fixture
def keys() -> Iterator[PipeInput]:
    with create_pipe_input() as opened:
        yield opened


def editor(keys: PipeInput, history: History | None = None) -> _input.Editor:
    return _input.Editor(COMMANDS, history or InMemoryHistory(), input=keys, output=DummyOutput())


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (f"  What is a cat? {ENTER}", "What is a cat?"),
        ("by a line feed\n", "by a line feed"),
        (f"one{ALT_ENTER}two{ENTER}", "one\ntwo"),
        (f"one\\{ENTER}  two{ENTER}", "one\n  two"),
        (f"a\\b{ENTER}", "a\\b"),
        (f"one\\\x1b[D{ENTER}two{ENTER}", "one\ntwo"),  # the cursor before the backslash
        ("\x1b[200~one\r\ntwo\nthree\x1b[201~" + f" and more{ENTER}", "one\ntwo\nthree and more"),
        (f"größer{ENTER}", "größer"),
        (ENTER, ""),
    ],
)
def test_a_message(keys: PipeInput, typed: str, message: str) -> None:
    keys.send_text(typed)
    assert editor(keys).read() == message


def test_a_byte_that_is_no_utf8_stays_one(keys: PipeInput) -> None:
    keys.send_bytes(b"a\xff\r")
    assert editor(keys).read() == "a\udcff"


@pytest.mark.parametrize(("key", "raised"), [(CTRL_C, KeyboardInterrupt), (CTRL_D, EOFError)])
def test_leaving(keys: PipeInput, key: str, raised: type[BaseException]) -> None:
    keys.send_text(key)
    with pytest.raises(raised):
        editor(keys).read()


def test_ctrl_d_in_a_line_does_not_leave(keys: PipeInput) -> None:
    keys.send_text(f"ab\x1b[D{CTRL_D}{ENTER}")
    assert editor(keys).read() == "a"


def test_messages_are_kept_for_the_next_run(
    keys: PipeInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    first = editor(keys, _input.history(Console()))
    for typed in (f"one{ALT_ENTER}two{ENTER}", f"/reset{ENTER}"):
        keys.send_text(typed)
        first.read()
    kept = tmp_path / "state/latentkv/chat_history"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert list(FileHistory(kept).load_history_strings()) == ["/reset", "one\ntwo"]


def test_where_the_history_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for state in ("", "relative"):
        monkeypatch.setenv("XDG_STATE_HOME", state)
        assert _input.history_path() == tmp_path / ".local/state/latentkv/chat_history"


def test_a_history_that_cannot_be_kept_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert isinstance(_input.history(Console()), InMemoryHistory)
    said = capsys.readouterr().err
    assert said.startswith("note: input history is not saved: ")
    assert said.endswith("chat_history: not a directory\n")


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("/", ["/reset", "/regen", "/save "]),
        ("/re", ["/reset", "/regen"]),
        ("/save", ["/save "]),
        ("re", []),
        ("a /re", []),
        ("/reset ", []),
        ("", []),
    ],
)
def test_completion_of_commands(line: str, offered: list[str]) -> None:
    found = _input.Commands(COMMANDS).get_completions(Document(line), CompleteEvent())
    assert [line[: len(line) + each.start_position] + each.text for each in found] == offered


def test_completion_of_files(tmp_path: Path) -> None:
    (tmp_path / "talk.lkv").touch()
    line = f"/save {tmp_path}/ta"
    found = list(_input.Commands(COMMANDS).get_completions(Document(line), CompleteEvent()))
    assert [line + each.text for each in found] == [f"/save {tmp_path}/talk.lkv"]


def test_plain_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\\\ntwo\n  three \n"))
    read = _input.reader(COMMANDS, Console())
    assert [read(), read()] == ["one\ntwo", "three"]
    with pytest.raises(EOFError):
        read()
    assert "\x1b" not in "".join(capsys.readouterr())
