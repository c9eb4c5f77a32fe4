"""The screen of a conversation: answers to standard output, the rest, dimmed, to standard error."""

from __future__ import annotations

import sys

from latentkv.console import terminal
from latentkv.console.printable import printable_lines


class Console:
    """`color` is auto, always or never (terminal.console)."""

    def __init__(self, color: str = "auto", quiet: bool = False) -> None:
        self._errors = terminal.console(sys.stderr, color)
        self.styled = self._errors.color_system is not None
        self.quiet = quiet

    def write(self, text: str) -> None:
        """A part of an answer, at once. A terminal gets none of the characters that it would obey; a pipe or
        a file gets what the model says."""
        sys.stdout.write(printable_lines(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """A line about what happens, never part of an answer."""
        self._say(text, "dim")

    def warn(self, text: str) -> None:
        self._say(text, "bold")

    def _say(self, text: str, style: str) -> None:
        self._errors.print(printable_lines(text), style=style, soft_wrap=not terminal.has_width(self._errors))
