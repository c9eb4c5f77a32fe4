"""Command-line arguments that several methods have, and the types of their values."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from .. import limits


def add_keep(parser: Any, default: float = 0.5) -> None:
    parser.add_argument(
        "--keep",
        type=fraction("a fraction", above_zero=True),
        default=default,
        metavar="F",
        help=f"kept share of all KV dimensions (default {default:g})",
    )


def add_group(parser: Any, default: int, text: str, flag: str = "--group") -> None:
    """text: of --help."""
    parser.add_argument(flag, type=group, default=default, metavar="N|all", help=text)


def add_exact(parser: Any, sink: str, recent: str, n_recent: int | None, of_model: str = "") -> None:
    """Tokens that stay exact. sink, recent: texts of --help, less the default. of_model: how many latest ones
    are, where that depends on the model."""
    for flag, most, default, text in (
        ("--sink", limits.SINK, 4, sink),
        ("--recent", limits.RECENT, n_recent, recent),
    ):
        parser.add_argument(
            flag,
            type=limits.tokens(0, most),
            default=default,
            metavar="N",
            help=f"{text} (default {of_model if default is None else default})",
        )


def fraction(what: str, above_zero: bool = False) -> Callable[[str], float]:
    """argparse type: a number from 0, or above it, to 1. what: how an error calls it."""
    expected = f"{what} above 0 and at most 1" if above_zero else f"{what} from 0 to 1"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not 0 <= value <= 1 or (above_zero and value == 0):
            raise argparse.ArgumentTypeError(f"{expected}; got {text}")
        return value

    return parse


def group(text: str) -> int | None:
    """argparse type: a number of KV heads, or `all` (None)."""
    if text == "all":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a number of KV heads or all; got {text}")
    return int(text)
