"""Command-line options of `waterfill`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .. import limits
from . import kv_budget
from .methods import parse_group

PREFER = {"speed": "rotated", "size": "rebuild"}  # the path of keys with RoPE
SEGMENT_WIDTHS = (32, 64, 128)
AUTO = 0  # --group: chosen by --prefer


def add_arguments(parser: Any) -> None:
    parser.add_argument(
        "--kv-budget",
        type=kv_budget.parse,
        default=kv_budget.parse("14%"),
        metavar="SIZE",
        help="size of the whole cache: a share of f16 (default 14%%), or bytes at a context (2.5GiB@131072)",
    )
    parser.add_argument(
        "--master",
        action="store_true",
        help="write a file that can be opened with any --kv-budget",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="read a quarter of the text (8192 tokens) and check the plan on two windows instead of six: "
        "less time, somewhat more loss (the report says how much to expect)",
    )
    parser.add_argument(
        "--prefer",
        choices=tuple(PREFER),
        default="speed",
        help="speed (default): about as fast as an f16 cache, keys are read as stored; size: loses less at "
        "equal bytes and is slower, every key is rebuilt at every read",
    )
    parser.add_argument(
        "--one-row",
        action="store_true",
        help="store one latent for K and V in layers that make both of one projection: half the bytes at the "
        "same rank; keys are rebuilt at every read",
    )
    parser.add_argument(
        "--served-context",
        type=limits.tokens(1, limits.SERVED_CONTEXT),
        default=None,
        metavar="N",
        help="context to fit the file for (default: the trained one), and to count a share of f16 at "
        "(default: 32768)",
    )
    parser.add_argument(
        "--sink",
        type=limits.tokens(0, limits.SINK),
        default=4,
        metavar="N",
        help="first tokens kept exact (default 4)",
    )
    parser.add_argument(
        "--recent",
        type=limits.tokens(0, limits.RECENT),
        default=128,
        metavar="N",
        help="latest tokens kept exact (default 128)",
    )
    parser.add_argument(
        "--group",
        type=parse_group,
        default=AUTO,
        metavar="N|all",
        help="KV heads whose keys share a latent (default: what --prefer asks for, at most 1024 channels)",
    )
    parser.add_argument(
        "--group-v",
        type=parse_group,
        default=AUTO,
        metavar="N|all",
        help="KV heads whose values share a latent (default: the same)",
    )
    parser.add_argument(
        "--gpu-times",
        type=Path,
        default=None,
        metavar="FILE",
        help="decoding times of your GPU, from bench/attention_times.py (default: those of an H100)",
    )
    parser.add_argument(
        "--segment",
        type=int,
        choices=(16, *SEGMENT_WIDTHS),
        default=None,
        help="channels with one scale, minimum and number of bits (default: what serves each tensor best)",
    )
