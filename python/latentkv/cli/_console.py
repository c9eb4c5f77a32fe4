"""The screen of a conversation: answers to standard output, the rest, dimmed, to standard error."""

from __future__ import annotations

import sys

from latentkv.console import terminal


class Console:
    """`color` is auto, always or never (terminal.console)."""

    def __init__(self, color: str = "auto", quiet: bool = False) -> None:
        self._errors = terminal.console(sys.stderr, color)
        self.styled = self._errors.color_system is not None
        self.quiet = quiet

    def write(self, text: str) -> None:
        """A part of an answer, at once."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """A line about what happens, never part of an answer."""
        self._say(text, "dim")

    def warn(self, text: str) -> None:
        self._say(text, "bold")

    def _say(self, text: str, style: str) -> None:
        self._errors.print(text, style=style, soft_wrap=not terminal.has_width(self._errors))
