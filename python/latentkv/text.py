"""From token bytes to text that is safe to show: whole characters only, never part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from latentkv.errors import expected


def utf8(text: str, where: str) -> bytes:
    """The text's bytes. Raises LatentKVError for a lone surrogate: half a character, or a byte of an argument
    that was no UTF-8."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise expected(where, "UTF-8", f"{_surrogate(text[error.start])} at offset {error.start}") from None


def _surrogate(half: str) -> str:
    code = ord(half)
    # Python hands an argument's byte b over as U+DC00 + b (PEP 383).
    return f"byte 0x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"a lone surrogate U+{code:04X}"


class Utf8Stream:
    """Joins token pieces to text; a character that spans tokens appears when its last byte does."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.is_whole = True  # no part of a character waits

    def push(self, piece: bytes) -> str:
        """The characters that `piece` completes; invalid bytes become U+FFFD."""
        if self.is_whole and piece.isascii():
            return piece.decode("ascii")
        text = self._decoder.decode(piece)
        self.is_whole = not self._decoder.getstate()[0]
        return text

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
        self.found: str | None = None  # the stop string that ended the text

    def push(self, text: str) -> tuple[str, bool]:
        """(text that can be shown, whether a stop string ended it). The stop string itself is never shown."""
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.found = min(found, key=lambda each: each[0])
            shown, self._held = self._held[:at], ""
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
    """The `stop` argument of the completion calls as a list. Empty strings, what clients make of an empty
    field, are left out, as by llama.cpp."""
    if stop is None:
        return []
    if not isinstance(stop, str) and not is_texts(stop):
        raise expected("stop", "a string, or a list of them", repr(stop))
    found = [stop] if isinstance(stop, str) else list(stop)
    for each in found:
        utf8(each, "stop")
    return [each for each in found if each]


def is_texts(value: object) -> bool:
    """Whether this is a sequence of texts, and no text itself."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str | bytes)
        and all(isinstance(each, str) for each in value)
    )
