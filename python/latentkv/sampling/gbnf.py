"""Grammars of llama.cpp (GBNF), parsed: what libllama reads, with the same meaning."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NoReturn, TypeAlias

from latentkv.errors import expected

DEEPEST = 256  # parentheses
LONGEST = 1 << 20  # characters


@dataclass(frozen=True)
class Literal:
    """Text that stands for itself."""

    text: str


@dataclass(frozen=True)
class Characters:
    """One character in these ranges, or (negated) in none of them. Without ranges and negated: any
    character."""

    ranges: tuple[tuple[int, int], ...]
    negated: bool = False


@dataclass(frozen=True)
class Token:
    """A token by its id or its text, or any other token."""

    name: str
    negated: bool = False


@dataclass(frozen=True)
class Reference:
    """Another rule."""

    name: str


@dataclass(frozen=True)
class Group:
    """What parentheses hold."""

    alternatives: tuple[Sequence_, ...]


Node: TypeAlias = "Literal | Characters | Token | Reference | Group"


@dataclass(frozen=True)
class Repeated:
    """A node repeated `least` to `most` times. most None: without limit."""

    node: Node
    least: int = 1
    most: int | None = 1


Sequence_: TypeAlias = tuple[Repeated, ...]
Rules: TypeAlias = dict[str, tuple[Sequence_, ...]]

_NAME = re.compile(r"[a-zA-Z0-9-]+")
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_RANGE = re.compile(r"\{\s*([0-9]+)\s*(?:(,)\s*([0-9]+)?\s*)?\}")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([tnr\\\"\[\]]))")
_TOKEN = re.compile(r"(!?)<([^<>\r\n]+)>")
_ESCAPED = {"t": "\t", "n": "\n", "r": "\r"}
_MOST_TIMES = 10**9


def parsed(text: str, root: str = "root", known: Collection[str] = ()) -> Rules:
    """The rules of a grammar by name. known: rules that need not be in it.

    Raises LatentKVError for text that is no grammar, for a rule that is not there, and for a repetition of
    at most fewer than at least.
    """
    if len(text) > LONGEST:
        raise expected("grammar", f"at most {LONGEST} characters", len(text))
    rules = _Parser(text).rules()
    if root not in rules:
        raise expected("grammar", f"a GBNF grammar with the rule {root!r}", _few(rules) or "an empty one")
    for name, alternatives in rules.items():
        for missing in _references(alternatives) - rules.keys() - set(known):
            raise expected(
                "grammar", "rules that are there", f"{missing!r} in {name!r}, which is none of them"
            )
    return rules


def _few(names: Rules) -> str:
    shown = ", ".join(list(names)[:5])
    return f"the rules {shown}" + (", …" if len(names) > 5 else "") if names else ""


def _references(alternatives: tuple[Sequence_, ...]) -> set[str]:
    found, waiting = set(), [alternatives]
    while waiting:
        for item in (item for sequence in waiting.pop() for item in sequence):
            if isinstance(item.node, Reference):
                found.add(item.node.name)
            elif isinstance(item.node, Group):
                waiting.append(item.node.alternatives)
    return found


@dataclass
class _Open:
    """Alternatives that are being read, of a rule or in parentheses."""

    done: list[Sequence_] = field(default_factory=list)
    now: list[Repeated] = field(default_factory=list)

    def next(self) -> None:
        self.done.append(tuple(self.now))
        self.now = []


class _Parser:
    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def rules(self) -> Rules:
        rules: Rules = {}
        self._skip(_SPACES)
        while self._at < len(self._text):
            name = self._match(_NAME) or self._fail("the name of a rule")
            self._skip(_SPACE)
            if not self._text.startswith("::=", self._at):
                self._fail("::=")
            self._at += 3
            self._skip(_SPACES)
            rules[name] = self._alternatives()
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                self._fail("a new line or the end")
            self._skip(_SPACES)
        return rules

    def _alternatives(self) -> tuple[Sequence_, ...]:
        """Reads up to the end of the line, or of the text."""
        opened = [_Open()]
        while True:
            space = _SPACES if len(opened) > 1 else _SPACE
            if self._text.startswith("(", self._at):
                self._at += 1
                if len(opened) > DEEPEST:
                    raise expected("grammar", f"parentheses at most {DEEPEST} deep", "deeper ones")
                self._skip(_SPACES)
                opened.append(_Open())
            elif self._text.startswith("|", self._at):
                self._at += 1
                self._skip(_SPACES)
                opened[-1].next()
            elif self._text.startswith(")", self._at) and len(opened) > 1:
                self._at += 1
                group = opened.pop()
                group.next()
                opened[-1].now.append(self._repeated(Group(tuple(group.done)), len(opened) > 1))
            elif (node := self._node()) is not None:
                opened[-1].now.append(self._repeated(node, len(opened) > 1))
            elif len(opened) > 1:
                self._fail("a closing parenthesis")
            else:
                opened[0].next()
                self._skip(space)
                return tuple(opened[0].done)

    def _repeated(self, node: Node, is_nested: bool) -> Repeated:
        space = _SPACES if is_nested else _SPACE
        self._skip(space)
        item = Repeated(node)
        while (times := self._times()) is not None:
            self._skip(space)
            item = Repeated(item.node if (item.least, item.most) == (1, 1) else Group(((item,),)), *times)
        return item

    def _node(self) -> Node | None:
        sign = self._text[self._at : self._at + 1]
        if sign == '"':
            return self._literal()
        if sign == "[":
            return self._characters()
        if sign == ".":
            self._at += 1
            return Characters((), negated=True)
        if sign and sign in "<!":
            found = _TOKEN.match(self._text, self._at) or self._fail("a token, <text> or <[id]>")
            self._at = found.end()
            return Token(found[2], negated=bool(found[1]))
        name = self._match(_NAME)
        return Reference(name) if name else None

    def _times(self) -> tuple[int, int | None] | None:
        sign = self._text[self._at : self._at + 1]
        if sign and sign in "*+?":
            self._at += 1
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        if sign != "{":
            return None
        found = _RANGE.match(self._text, self._at) or self._fail("a repetition, {m}, {m,} or {m,n}")
        if max(len(found[1]), len(found[3] or "")) > len(str(_MOST_TIMES)):
            self._fail(f"repetitions of at most {_MOST_TIMES}")
        least = int(found[1])
        most = int(found[3]) if found[3] else None if found[2] else least
        if most is not None and most < least:
            self._fail("a repetition {m,n} with m of at most n")
        self._at = found.end()
        return least, most

    def _literal(self) -> Literal:
        begin, out = self._at, []
        self._at += 1
        while not self._text.startswith('"', self._at):
            if self._at >= len(self._text):
                self._at = begin
                self._fail("a closing quote")
            out.append(self._character())
        self._at += 1
        return Literal("".join(map(chr, out)))

    def _characters(self) -> Characters:
        begin, ranges = self._at, []
        self._at += 1
        negated = self._text.startswith("^", self._at)
        self._at += negated
        while not self._text.startswith("]", self._at):
            if self._at >= len(self._text):
                self._at = begin
                self._fail("a closing bracket")
            first = last = self._character()
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                last = self._character()
            ranges.append((first, last))
        self._at += 1
        if not ranges and not negated:
            self._fail("at least one character in brackets")
        return Characters(tuple(ranges), negated)

    def _character(self) -> int:
        if not self._text.startswith("\\", self._at):
            if self._at >= len(self._text):
                self._fail("a character")
            self._at += 1
            return ord(self._text[self._at - 1])
        found = _ESCAPE.match(self._text, self._at) or self._fail("an escape that GBNF has")
        self._at = found.end()
        if found[4]:
            return ord(_ESCAPED.get(found[4], found[4]))
        code = int(found[1] or found[2] or found[3], 16)
        if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
            self._fail("an escape that is a character")
        return code

    def _match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self._at)
        self._at = found.end() if found else self._at
        return found[0] if found else ""

    def _skip(self, pattern: re.Pattern[str]) -> None:
        self._match(pattern)

    def _fail(self, wanted: str) -> NoReturn:
        line = self._text.count("\n", 0, self._at) + 1
        got = repr(self._text[self._at : self._at + 30]) if self._at < len(self._text) else "the end"
        raise expected("grammar", wanted, f"{got} in line {line}")
