"""Text from files and callers without the characters that a terminal would obey."""

from __future__ import annotations

import re

# C0 and C1 controls and DEL; what separates lines or turns the direction of text, so that it reads otherwise
# than it is (Unicode's Bidi_Control); lone surrogates, which no stream encodes. native/src/base/error.cpp has
# the same.
_OBEYED = "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_IN_A_LINE = re.compile(f"[{_OBEYED}]")
_IN_LINES = re.compile(f"(?![\\t\\n])[{_OBEYED}]")


def printable(text: str) -> str:
    """One line, in which such characters are their UTF-8 bytes as \\\\xNN.

    >>> printable("a\\x1b[2J\\nb")
    'a\\\\x1b[2J\\\\x0ab'
    """
    return _IN_A_LINE.sub(_spelled, text)


def printable_lines(text: str) -> str:
    """The same for text that may have lines and tabs.

    >>> printable_lines("a\n\x1bb")
    'a\n\\x1bb'
    """
    return _IN_LINES.sub(_spelled, text)


def _spelled(found: re.Match[str]) -> str:
    return "".join(f"\\x{byte:02x}" for byte in found[0].encode("utf-8", "surrogatepass"))
