"""The command line: argparse, whose complaints look like all others.

argparse stays. llama.cpp's names have one dash and several letters (-ngl, -ctk), a method of the converter
adds options of its own, and the tables of options are what another library would need as well. What is by
hand is one class that turns argparse's sentences into ours."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from latentkv.errors import LatentKVError, expected
from latentkv.ranges import KV_READ, N_GPU_LAYERS, SHARE, Range, RealRange
from latentkv.text import utf8

# What argparse says of one option, and what is expected and got then.
_OF_AN_OPTION = (
    (r"(?:expected )?(.+); got (.*)", r"\1", r"\2"),  # a type of ours
    (r"invalid choice: (.+) \(choose from (.+)\)", r"one of \2", r"\1"),
    (r"invalid int value: (.+)", "an integer", r"\1"),
    (r"invalid float value: (.+)", "a number", r"\1"),
    (r"ignored explicit argument (.+)", "no value", r"\1"),
    (r"expected (.+)", r"\1", "none"),
)


class Parser(argparse.ArgumentParser):
    """Raises LatentKVError, where argparse prints its usage and ends the process. Options have one spelling:
    `-fa` is not `-f a`, nor `-m` the beginning of `-mg`."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(
            prog=prog, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options
        )

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """The options that a word may be short for: none. allow_abbrev is about long ones alone."""
        return []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_args(self._joined(sys.argv[1:] if args is None else args), namespace)

    def _joined(self, words: Sequence[str]) -> list[str]:
        """`-fa on` to `-fa=on`: an option whose value may be left out takes the next word where it is one of
        its choices, and no other, which may be a FILE."""
        joined: list[str] = []
        rest = list(words)
        while rest:
            word = rest.pop(0)
            if word == "--":
                return [*joined, word, *rest]
            action = self._option_string_actions.get(word)
            if action is not None and action.nargs == "?" and action.choices is not None:
                word += f"={rest.pop(0) if rest and rest[0] in action.choices else action.const}"
            joined.append(word)
        return joined

    def error(self, message: str) -> NoReturn:
        named = re.fullmatch(r"argument ([^/:]+)[^:]*: (.*)", message, re.DOTALL)
        if named is not None:
            for said, wanted, got in _OF_AN_OPTION:
                if found := re.fullmatch(said, named[2], re.DOTALL):
                    raise expected(named[1], found.expand(wanted), found.expand(got))
        missing = message.removeprefix("the following arguments are required: ")
        if missing != message:
            raise expected(self.prog, missing, "none", f"see {self.prog} --help")
        unknown = message.removeprefix("unrecognized arguments: ")
        raise expected(
            self.prog, f"options as in {self.prog} --help", unknown, self._alike(unknown.split()[0])
        )

    def _alike(self, word: str) -> str:
        """A hint at the option of --help that `word` begins, or is a slip of."""
        actions = self._option_string_actions.items()
        own = [name for name, a in actions if name.startswith("--") and a.help is not argparse.SUPPRESS]
        if not word.startswith("--"):
            return ""
        found = [option for option in own if option.startswith(word)]
        found = found or difflib.get_close_matches(word, own, 1, 0.75)
        return f"perhaps {found[0]}" if found else ""


def number(allowed: Range | RealRange) -> Callable[[str], float]:
    """An argparse type: a number within a range, refused in our words."""

    def convert(text: str) -> float:
        try:
            return allowed.read(text)
        except ValueError:  # LatentKVError is one
            raise argparse.ArgumentTypeError(f"{allowed}; got {text}") from None

    return convert


def numbers(allowed: Range) -> Callable[[str], list[int]]:
    """An argparse type: such numbers, separated by commas."""
    return lambda text: [int(number(allowed)(each)) for each in text.split(",")]


def number_or_auto(allowed: Range) -> Callable[[str], int | str]:
    """An argparse type: the same, or `auto`."""

    def convert(text: str) -> int | str:
        try:
            return text if text == "auto" else allowed.read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{allowed}, or auto; got {text}") from None

    return convert


def gpu_layers(text: str) -> int | str:
    """An argparse type: how many layers go to GPUs; `all`, as llama.cpp has it."""
    return -1 if text == "all" else number_or_auto(N_GPU_LAYERS)(text)


def tokens_or_all(text: str) -> float:
    """An argparse type: how many tokens are read; 0 for `all`."""
    return 0 if text == "all" else number(KV_READ)(text)


def shares(text: str) -> tuple[float, ...]:
    """An argparse type: `3,1`, or `3/1` as llama.cpp reads it."""
    try:
        return tuple(SHARE.read(share) for share in re.split("[,/]", text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"shares of 0 or more, as in 3,1; got {text}") from None


def split_mode(text: str) -> str:
    """An argparse type: how GPUs share a model."""
    if text not in ("none", "layer"):
        raise argparse.ArgumentTypeError(f"none or layer, as a layer has one device; got {text}")
    return text


def text(argument: str) -> str:
    """An argparse type: what native code takes as UTF-8."""
    try:
        utf8(argument, "")
    except LatentKVError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("[] ")) from None
    return argument
