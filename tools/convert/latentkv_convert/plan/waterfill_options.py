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
        help="speed (default): decodes about as fast as an f16 cache, keys are read as they are stored; "
        "size: loses less at equal bytes and is slower, every key is computed from its latent at every read",
    )
    parser.add_argument(
        "--served-context",
        type=limits.tokens(1, limits.SERVED_CONTEXT),
        default=None,
        metavar="N",
        help="context that it is fitted for (default: the model's), and at which a share of f16 is counted "
        "(default 32768)",
    )
    parser.add_argument(
        "--sink",
        type=limits.tokens(0, limits.SINK),
        default=4,
        metavar="N",
        help="first tokens kept whole (default 4)",
    )
    parser.add_argument(
        "--recent",
        type=limits.tokens(0, limits.RECENT),
        default=128,
        metavar="N",
        help="latest tokens kept whole (default 128)",
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
        help="what decoding costs on your GPU, from bench/attention_times.py (default: on an H100)",
    )
    parser.add_argument(
        "--segment",
        type=int,
        choices=(16, *SEGMENT_WIDTHS),
        default=None,
        help="channels with one scale, minimum and number of bits (default: what serves each tensor best)",
    )
