"""Answers that end at a line: their time is up, or the line is indented less than asked, as an editor wants
of what it fills in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LineLimits:
    """seconds: from the first token on, after which the next newline ends the answer; 0: without end.
    indent: blanks and tabs that every line but the first begins with at least."""

    seconds: float = 0.0
    indent: int = 0


class Lines:
    """One answer's."""

    def __init__(self, limits: LineLimits) -> None:
        self._limits = limits
        self._blanks: int | None = None  # of a line that has nothing else yet

    def push(self, text: str, seconds: float) -> int | None:
        """How many characters of the text stay, where the answer ends in it. seconds: since its first
        token."""
        for at, character in enumerate(text if self._limits.indent else ""):
            if self._blanks is not None and character in " \t":
                self._blanks += 1
                continue
            if self._blanks is not None and self._blanks < self._limits.indent:
                return at
            self._blanks = 0 if character == "\n" else None
        is_late = 0 < self._limits.seconds < seconds
        return len(text) if is_late and "\n" in text else None
