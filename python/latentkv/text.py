"""From token bytes to text that is safe to show: whole characters only, never part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from latentkv.errors import expected


class Utf8Stream:
    """Joins token pieces to text; a character that spans tokens appears when its last byte does."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, piece: bytes) -> str:
        """The characters that `piece` completes; invalid bytes become U+FFFD."""
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character, else nothing."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Finds stop strings in a stream and holds back every suffix that may still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise expected("stop", "strings of at least one character", "''")
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that can be shown, whether a stop string ended it). The stop string itself is never shown."""
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        keep = self._partial()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown, False

    def flush(self) -> str:
        """The held text: the stream ended before it became a stop string."""
        shown, self._held = self._held, ""
        return shown

    def _partial(self) -> int:
        """Length of the longest suffix of the held text that begins a stop string."""
        longest = min(len(self._held), max((len(stop) - 1 for stop in self._stops), default=0))
        for length in range(longest, 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0


def stop_list(stop: str | Sequence[str] | None) -> list[str]:
    """The `stop` argument of the completion calls as a list."""
    if stop is None:
        return []
    return [stop] if isinstance(stop, str) else list(stop)
