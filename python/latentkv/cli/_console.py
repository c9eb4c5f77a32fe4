"""The terminal: answers to standard output, the rest, dimmed, to standard error."""

from __future__ import annotations

import os
import sys

_DIM, _BOLD, _RESET = "\x1b[2m", "\x1b[1m", "\x1b[0m"


class Console:
    """`color` is auto, always or never; auto colors terminals, unless NO_COLOR is set."""

    def __init__(self, color: str = "auto", quiet: bool = False) -> None:
        def wanted(terminal: bool) -> bool:
            return color == "always" or (color == "auto" and terminal and "NO_COLOR" not in os.environ)

        self._color_out = wanted(sys.stdout.isatty())
        self._color_err = wanted(sys.stderr.isatty())
        self.quiet = quiet

    def write(self, text: str) -> None:
        """A part of an answer, at once."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """A line about what happens, never part of an answer."""
        print(f"{_DIM}{text}{_RESET}" if self._color_err else text, file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        print(f"{_BOLD}{text}{_RESET}" if self._color_err else text, file=sys.stderr, flush=True)

    def end_line(self) -> None:
        """Leaves the line that the user was typing."""
        print(file=sys.stderr, flush=True)

    def read(self, first: bool = True) -> str:
        """One line from the user. Raises EOFError (Ctrl-D) and KeyboardInterrupt (Ctrl-C)."""
        prompt = "> " if first else "… "
        # \001 and \002 tell readline which bytes have no width.
        return input(f"\001{_BOLD}\002{prompt}\001{_RESET}\002" if self._color_out else prompt)
