"""What the user types: a line editor in a terminal, plain lines in one that cannot move its cursor."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import ColorDepth, Output, create_output
from prompt_toolkit.utils import is_dumb_terminal

from latentkv.cli._console import Console

FIRST, NEXT = "> ", "… "


class Command(NamedTuple):
    """A /command: what it does with the rest of its line, what that is (FILE completes paths), its line of
    help."""

    run: Callable[[str], None]
    argument: str
    meaning: str


def reader(commands: dict[str, Command], console: Console) -> Callable[[], str]:
    """What reads one message. It raises EOFError (Ctrl-D) and KeyboardInterrupt (Ctrl-C)."""
    if is_dumb_terminal() or not (sys.stdout.isatty() or sys.stderr.isatty()):
        return plain
    return Editor(commands, history(console), bold=console.styled).read


def plain() -> str:
    """A line of standard input; a backslash at its end asks for another."""
    try:
        lines = [input(FIRST)]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(input(NEXT))
    except (EOFError, KeyboardInterrupt):
        print(file=sys.stderr, flush=True)  # leaves the line that the user was typing
        raise
    return "\n".join(lines).strip()


class Editor:
    """Editing, history and completion. Enter sends; Alt-Enter, or a backslash before Enter, adds a line, as
    does a pasted one."""

    def __init__(
        self,
        commands: dict[str, Command],
        history: History,
        *,
        bold: bool = True,
        input: Input | None = None,
        output: Output | None = None,
    ) -> None:
        style = "bold" if bold else ""
        self._session: PromptSession[str] = PromptSession(
            [(style, FIRST)],
            multiline=True,
            prompt_continuation=[(style, NEXT)],
            completer=Commands(commands),
            complete_while_typing=Condition(lambda: get_app().current_buffer.text.startswith("/")),
            history=history,
            key_bindings=_keys(),
            enable_suspend=True,
            color_depth=None if bold else ColorDepth.DEPTH_1_BIT,
            input=input,
            output=output or create_output(always_prefer_tty=True),  # answers may go to a file
        )

    def read(self) -> str:
        return self._session.prompt().strip()


class Commands(Completer):
    """Names that begin like the line, then paths where the command takes a file."""

    def __init__(self, commands: dict[str, Command]) -> None:
        self._commands = commands
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        line = document.text_before_cursor
        name, space, rest = line.partition(" ")
        if not space and line.startswith("/"):
            for each, command in self._commands.items():
                if each.startswith(line):
                    shown = f"{each} " if command.argument else each
                    yield Completion(shown, -len(line), display=each, display_meta=command.meaning)
        elif name in self._commands and self._commands[name].argument == "FILE":
            yield from self._paths.get_completions(Document(rest, len(rest)), event)


def _keys() -> KeyBindings:
    keys, typing = KeyBindings(), has_focus(DEFAULT_BUFFER)  # and not searching the history

    @keys.add("enter", filter=typing)
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if not buffer.document.current_line.endswith("\\"):
            buffer.validate_and_handle()
            return
        buffer.cursor_position += buffer.document.get_end_of_line_position()
        buffer.delete_before_cursor()
        buffer.newline(copy_margin=False)

    @keys.add("escape", "enter", filter=typing)
    def add_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return keys


class _File(FileHistory):
    def store_string(self, string: str) -> None:
        super().store_string(string.encode(errors="replace").decode())  # bytes that were no UTF-8


def history_path() -> Path:
    """$XDG_STATE_HOME/latentkv/chat_history, or the same in ~/.local/state."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))  # by XDG's rules a relative one does not count
    return (state if state.is_absolute() else Path.home() / ".local/state") / "latentkv/chat_history"


def history(console: Console) -> History:
    """What was typed in earlier runs, in a file that its owner alone can read."""
    path = history_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        console.warn(f"note: input history is not saved: {path}: {why}")
        return InMemoryHistory()
    return _File(path)
