"""One line on stderr that is rewritten in place; nothing where stderr is no terminal."""

from __future__ import annotations

import shutil
import sys
import time


class ProgressLine:
    """`with ProgressLine() as line: line.show("…")`. The line is gone afterwards."""

    def __enter__(self) -> ProgressLine:
        self._on = sys.stderr.isatty()
        self._next = 0.0
        return self

    def show(self, text: str) -> None:
        """At most ten times a second."""
        now = time.monotonic()
        if self._on and now >= self._next:
            self._next = now + 0.1
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write(f"\r\x1b[K{text[:width]}")
            sys.stderr.flush()

    def __exit__(self, *error: object) -> None:
        if self._on:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def bar(share: float, width: int = 24) -> str:
    """`[#####-------]`"""
    full = round(share * width)
    return f"[{'#' * full}{'-' * (width - full)}]"
