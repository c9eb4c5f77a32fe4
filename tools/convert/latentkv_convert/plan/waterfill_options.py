"""Command-line options of `waterfill`."""

from __future__ import annotations

import argparse
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
        help="whole cache: a share of the f16 one (default 14%%), or bytes at a context (2.5GiB@131072)",
    )
    parser.add_argument(
        "--master",
        action="store_true",
        help="a file that can be planned anew for any --kv-budget when it is opened",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="read a quarter of the text (8192 tokens) and check the plan on two windows, not six: less "
        "time, and a plan that loses somewhat more (the report says what to expect)",
    )
    parser.add_argument(
        "--prefer",
        choices=tuple(PREFER),
        default="speed",
        help="speed (default): what loses least and decodes as fast as an f16 cache from 4096 tokens on, "
        "keys read as stored; size: what loses least, keys with RoPE rebuilt at every read",
    )
    parser.add_argument(
        "--served-context",
        type=limits.tokens(1, limits.SERVED_CONTEXT),
        default=None,
        metavar="N",
        help="context speed is fitted for (default: the model's) and a share counted at (default 32768)",
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
        help="KV heads that share a K latent (default: what --prefer asks for, of 1024 channels at most)",
    )
    parser.add_argument(
        "--group-v",
        type=parse_group,
        default=AUTO,
        metavar="N|all",
        help="KV heads that share a V latent (default: what --prefer asks for, of 1024 channels at most)",
    )
    parser.add_argument(
        "--gpu-times",
        type=Path,
        default=None,
        metavar="FILE",
        help="what decoding costs on a GPU, from bench/attention_times.py (default: an H100's)",
    )
    parser.add_argument(
        "--weight",
        choices=("fisher", "energy"),
        default="fisher",
        help="what an error costs by its direction (default), or the same in every direction of a tensor",
    )
    parser.add_argument(
        "--balance",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="scale channels by the fourth root of their variance (default)",
    )
    parser.add_argument(
        "--segment",
        type=int,
        choices=(16, *SEGMENT_WIDTHS),
        default=None,
        help="channels with one format, scale and minimum (default: what serves each tensor best)",
    )
