"""llama.cpp's flags, which the parsers accept without showing them in --help.

Each is the same as one of ours, changes nothing and is noted, or is refused with what to write instead
(llama_cpp_flags.txt).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latentkv.errors import expected

_TABLE = Path(__file__).with_name("llama_cpp_flags.txt")
_NOTED = "noted"  # of a namespace: [(flag, why nothing is to be done)]


@dataclass(frozen=True)
class Flag:
    """A row of the table. value: what follows the flag in help, "" where nothing does. choices: the value may
    be left out, and is one of these. verdict: equals, ignored or refused; at: the values that are ignored,
    empty = all; same: our flag, and perhaps its value."""

    commands: tuple[str, ...]
    names: tuple[str, ...]
    value: str
    choices: tuple[str, ...]
    verdict: str
    at: tuple[str, ...]
    same: tuple[str, ...]
    words: str


def flags(command: str) -> Iterator[Flag]:
    """The flags that a command knows."""
    for line in _TABLE.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            flag = _flag(line)
            if "*" in flag.commands or command in flag.commands:
                yield flag


def _flag(line: str) -> Flag:
    commands, named, said, words = [*line.split(" | "), ""][:4]
    names = tuple(word for word in named.split() if word.startswith("-"))
    value = " ".join(word for word in named.split() if not word.startswith("-"))
    choices = tuple(value.strip("[]").split("|")) if value.startswith("[") else ()
    verdict, *rest = said.split()
    at = tuple(rest[1].split(",")) if verdict == "ignored" and rest else ()
    same = tuple(rest) if verdict == "equals" else ()
    return Flag(tuple(commands.split()), names, value, choices, verdict, at, same, words)


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that a command's parser lacks. Call it after the command's own options are added."""
    for flag in flags(parser.prog.split()[-1]):
        ours = parser._option_string_actions  # by name; argparse has no public way to find one
        names = [name for name in flag.names if name not in ours]
        if not names:
            continue
        options: dict[str, Any] = {"dest": argparse.SUPPRESS, "help": argparse.SUPPRESS, "flag": flag}
        if flag.verdict == "equals":
            target = ours[flag.same[0]]
            parser.add_argument(*names, action=_Same, target=target, **options)
            continue
        nargs: int | str | None = None if flag.value else 0
        if flag.choices:
            nargs, options = "?", options | {"choices": flag.choices, "const": flag.choices[0]}
        parser.add_argument(*names, action=_Other, nargs=nargs, **options)


def noted(args: argparse.Namespace) -> str:
    """One line about the flags that were given and change nothing, or ""."""
    told = dict(getattr(args, _NOTED, ()))
    if not told:
        return ""
    return "no effect: " + ", ".join(f"{name} ({why})" for name, why in told.items())


class _Same(argparse.Action):
    """Does what the equivalent option of latentkv does."""

    def __init__(
        self, option_strings: list[str], dest: str, *, target: Any, flag: Flag, **options: Any
    ) -> None:
        fixed = len(flag.same) > 1
        super().__init__(
            option_strings,
            dest,
            nargs=0 if fixed else target.nargs,
            const=target.const,
            type=None if fixed else target.type,
            choices=None if fixed else target.choices,
            default=argparse.SUPPRESS,
            **options,
        )
        self._target = target
        self._fixed = target.type(flag.same[1]) if fixed else None

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        self._target(parser, namespace, values if self._fixed is None else self._fixed, option_string)


class _Other(argparse.Action):
    """Notes a flag that changes nothing, and refuses any other."""

    def __init__(self, option_strings: list[str], dest: str, *, flag: Flag, **options: Any) -> None:
        super().__init__(option_strings, dest, default=argparse.SUPPRESS, **options)
        self._flag = flag

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        name, flag = option_string or self.option_strings[0], self._flag
        if flag.verdict == "refused":
            raise expected(name, "an option of latentkv", "one of llama.cpp", flag.words)
        if flag.at and values not in flag.at:
            raise expected(name, " or ".join(flag.at), values, flag.words)
        why = "it changes nothing" if flag.at else flag.words
        setattr(namespace, _NOTED, [*getattr(namespace, _NOTED, ()), (name, why)])
