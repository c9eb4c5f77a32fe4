"""Regular expressions of JSON schemas (ECMA-262) in the dialect of llguidance (Rust's `regex`).

Validators read them in two ways: JavaScript's, where \\d and \\w are ASCII, and Python's `re`, where they
are Unicode. What is written here is what both take: a class is the smaller of the two. Where a pattern says
of which keys a schema holds, it is what either takes.
"""

from __future__ import annotations

import re

_SPACE = r"\t\n\x0b\x0c\r \u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}"
_CLASSES = {
    "d": "[0-9]",
    "D": r"[^\p{Nd}]",
    "w": "[0-9a-zA-Z_]",
    "W": r"[^\p{L}\p{N}\p{M}_]",
    "s": f"[{_SPACE}]",
    "S": rf"[^{_SPACE}\x1c-\x1f\x85\u{{feff}}]",
}
_ANY = r"[^\n\r\u{2028}\u{2029}]"
_WIDE_CLASSES = {
    "d": r"[\p{Nd}]",
    "D": "[^0-9]",
    "w": r"[\p{L}\p{N}\p{M}_]",
    "W": "[^0-9a-zA-Z_]",
    "s": rf"[{_SPACE}\x1c-\x1f\x85\u{{feff}}]",
    "S": f"[^{_SPACE}]",
}
_WIDE = {".": r"[^\n]", "$": r"\n?$"}  # in Python, $ may stand before a last line feed
# No escape but \u has them, which grammars do not allow. llguidance would leave out one that stands alone.
UNWRITABLE = {chr(code) for code in (*range(32), 127)} - set("\b\t\n\f\r")
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_REPEAT = re.compile(r"\{[0-9]+(?:,[0-9]*)?\}|[*+?]")


class PatternError(ValueError):
    """A part of a pattern that cannot be translated."""


def translated(pattern: str, is_wide: bool = False) -> str:
    """The pattern for llguidance, with the meaning of a search: `^` and `$` stay. is_wide: whatever one of
    the dialects takes. Raises PatternError for lookaround, back-references, word boundaries, and what the two
    dialects disagree about.

    >>> translated(r"^\\d{3}/[\\w-.]$")
    '^[0-9]{3}\\\\/[[0-9a-zA-Z_]\\\\-\\\\.]$'
    """
    return _Translation(pattern, is_wide).text()


class _Translation:
    def __init__(self, pattern: str, is_wide: bool) -> None:
        self._pattern, self._at, self._is_wide = pattern, 0, is_wide
        self._out: list[str] = []

    def text(self) -> str:
        while self._at < len(self._pattern):
            self._item()
        return "".join(self._out)

    def _item(self) -> None:
        sign = self._pattern[self._at]
        if sign == "\\":
            text, code = self._escape(in_class=False)
            self._out.append(text if code is None else _alone(code))
        elif sign == "[":
            self._out.append(self._class())
        elif sign == "(":
            self._out.append(self._group())
        elif found := _REPEAT.match(self._pattern, self._at):
            self._at = found.end()
            self._out.append(found[0])
            if self._pattern.startswith("?", self._at):
                self._at += 1  # lazy: the same texts match
            elif _REPEAT.match(self._pattern, self._at):
                raise PatternError("one quantifier after another")
        elif re.compile(r"\{,[0-9]+\}").match(self._pattern, self._at):
            raise PatternError("a quantifier without a lower bound, which one dialect reads as text")
        else:
            self._at += 1
            self._out.append(self._sign(sign))

    def _sign(self, sign: str) -> str:
        if self._is_wide and sign in _WIDE:
            return _WIDE[sign]
        return _ANY if sign == "." else sign if sign in ")|^$" else _alone(ord(sign))

    def _group(self) -> str:
        begin = re.compile(r"\((\?(?::|P?<[A-Za-z_]\w*>|[a-z]+[:)]|.{0,2})?)?").match(self._pattern, self._at)
        assert begin is not None
        mark = begin[1] or ""
        if mark in ("", "?:") or mark.endswith(">"):
            self._at = begin.end()
            return "(?:"
        if mark == "?i:" or (mark == "?i)" and self._at == 0):  # Python's flag in front is JavaScript's /i
            self._at = begin.end()
            return begin[0]
        if mark[:2] in ("?=", "?!") or mark[:3] in ("?<=", "?<!"):
            raise PatternError(f"lookaround ({begin[0]})")
        raise PatternError(f"flags or a group of the kind {begin[0]!r}")

    def _class(self) -> str:
        begin = self._at
        self._at += 1
        is_negated = self._pattern.startswith("^", self._at)
        if is_negated:  # what it leaves out is the larger where the whole is the smaller
            self._at += 1
            self._is_wide = not self._is_wide
        out, codes = "", []
        if self._pattern.startswith("]", self._at):
            raise PatternError("a class that begins with ']', which is empty in one dialect only")
        while not self._pattern.startswith("]", self._at):
            item, first = self._class_item(begin)
            is_range = self._pattern.startswith("-", self._at) and not self._pattern.startswith(
                "-]", self._at
            )
            if not is_range or first is None:
                out += item
                codes.append(first)
                continue
            self._at += 1
            end, last = self._class_item(begin)
            if last is not None and last < first:
                raise PatternError(f"a range that runs backwards, {chr(first)}-{chr(last)}")
            codes += [first, last]
            out += f"{item}-{end}" if last is not None else rf"{item}\-{end}"  # a-\d: three things
        self._at += 1
        if is_negated:
            self._is_wide = not self._is_wide
            return f"[^{out}]"
        if len(codes) == 1 and codes[0] is not None:
            _alone(codes[0])
        return f"[{out}]"

    def _class_item(self, begin: int) -> tuple[str, int | None]:
        """The next item of a class, and its code point if it is a single character."""
        if self._at >= len(self._pattern):
            raise PatternError(f"a class without end at offset {begin}")
        if self._pattern[self._at] == "\\":
            return self._escape(in_class=True)
        sign = ord(self._pattern[self._at])
        self._at += 1
        return _literal(sign), sign

    def _escape(self, in_class: bool) -> tuple[str, int | None]:
        rest = self._pattern[self._at + 1 :]
        sign = rest[:1]
        self._at += 2
        if sign in _CLASSES:
            return (_WIDE_CLASSES if self._is_wide else _CLASSES)[sign], None
        if sign in ("p", "P") and (found := re.match(r"[pP]\{\^?[\w=]+\}", rest)):
            self._at += len(found[0]) - 1
            return "\\" + found[0], None
        if sign == "b" and in_class:
            return _literal(8), 8
        if sign in ("b", "B"):
            raise PatternError(rf"a word boundary (\{sign})")
        if sign in "123456789k" and sign:
            raise PatternError(rf"a back-reference (\{sign})")
        if sign in _CONTROLS and not (sign == "0" and rest[1:2].isdigit()):
            return _literal(_CONTROLS[sign]), _CONTROLS[sign]
        if found := re.match(r"x([0-9a-fA-F]{2})|u\{([0-9a-fA-F]{1,6})\}|u([0-9a-fA-F]{4})", rest):
            self._at += len(found[0]) - 1
            code = int(found[1] or found[2] or found[3], 16)
            pair = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(self._pattern, self._at)
            if 0xD800 <= code < 0xDC00 and pair is not None:
                self._at = pair.end()
                code = 0x10000 + ((code - 0xD800) << 10) + int(pair[1], 16) - 0xDC00
            return _literal(code), code
        if not sign or sign.isalnum() or sign == "_":
            raise PatternError(rf"the escape \{sign}")
        return _literal(ord(sign)), ord(sign)


def _literal(code: int) -> str:
    """One character that stands for itself, also in a class."""
    if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
        raise PatternError(f"half a character, U+{code:04X}")
    sign = chr(code)
    if sign.isascii() and sign.isalnum():
        return sign
    if sign in "_ '\"<>,;:=@%`!":
        return sign
    return "\\" + sign if sign.isascii() and sign.isprintable() else rf"\u{{{code:x}}}"


def _alone(code: int) -> str:
    if chr(code) in UNWRITABLE:
        raise PatternError(f"a control character, U+{code:04X}")
    return _literal(code)


def quoted(text: str) -> str:
    """A pattern that matches exactly this text."""
    return "".join(_literal(ord(sign)) for sign in text)
