"""Rank and bits of every segment from one byte budget, in nats of divergence.

Per layer and side, with M the second moment of the cached rows and F the Fisher moment of their copies in the
cache (calibrate/copies.py): R = F^(1/2), R M R = U Λ Uᵀ, down = R U, up = Uᵀ R⁻¹. These coordinates are
uncorrelated under M and sorted by their share of the weighted error ½ tr(F E[e eᵀ]); F = I would be PCA. They
are cut in segments, scaled by Λ^(-1/4) and rotated inside them, and every segment gets the row format that
one price per byte buys (latentkv/plan/allocation.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from latentkv.plan.kv_budget import KvBudget, parse

from ... import limits
from ...errors import ConvertError
from ...ir import SIDES, ModelSpec
from ...recipe import Recipe
from ...rows import sizes
from ...schema import RANK_PAD
from .. import allotment, arguments, latent_plan
from ..candidates import ROW_WIDTHS, Shape
from ..times import gpu_file
from ..waterfill import DEPTHS, Waterfill
from . import group_size

SUMMARY = "rank and bits of every segment from one byte budget (--kv-budget)"
UNEQUAL_HEADS = True  # layers may have KV heads of their own
PREFER = {"speed": "rotated", "size": "rebuild"}  # the path of keys with RoPE
SEGMENT_WIDTHS = (32, 64, 128)
AUTO = 0  # --group: chosen by --prefer
SHARE_CONTEXT = 32768  # tokens at which a share of f16 is counted
# Latest tokens that stay exact, at least and at most. At the same bytes SmolLM2-135M loses 0.0140 nats at
# 8.5 % of f16 with 128 and 0.0079 with 256 (windows of 2048 tokens).
RECENT = (128, 256)
# Channels of the widest group that is chosen by itself: factors grow with the square of its width (four
# groups of 1024 take a quarter of what one of 4096 does), and a GPU kernel takes at most 1024 stored ones.
GROUP_WIDTH = 1024


def add_arguments(parser: Any) -> None:
    parser.add_argument(
        "--kv-budget",
        type=_budget,
        default=_budget("14%"),
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
    of_model = f"{RECENT[1]}, or {RECENT[0]} for short contexts, sliding windows and MLA"
    arguments.add_exact(parser, "first tokens kept exact", "latest tokens kept exact", None, of_model)
    keys = "KV heads whose keys share a latent (default: what --prefer asks for, at most 1024 channels)"
    arguments.add_group(parser, AUTO, keys)
    values = "KV heads whose values share a latent (default: the same)"
    arguments.add_group(parser, AUTO, values, "--group-v")
    parser.add_argument(
        "--gpu-times",
        type=_times,
        default=None,
        metavar="FILE",
        help="decoding times of the GPU that the file is for, from bench/attention_times.py, or "
        f"{' or '.join(gpu_file.SHIPPED)} (default: auto, for the GPU of this machine, or an H100)",
    )
    parser.add_argument(
        "--scales",
        choices=("row", "segment"),
        default=None,
        help="row (default, but with --segment and for MLA): groups begin with four scales, which loses "
        "less at equal bytes; segment: every segment has a scale and a minimum",
    )
    parser.add_argument(
        "--polish",
        type=limits.natural,
        default=0,
        metavar="N",
        help="train the factors for N steps of 4 windows against the model's own predictions (default 0: no)",
    )
    parser.add_argument(
        "--segment",
        type=int,
        choices=(16, *SEGMENT_WIDTHS),
        default=None,
        help="channels with one scale, minimum and number of bits (default: what serves each tensor best)",
    )


def _budget(text: str) -> KvBudget:
    """argparse type: `14%` of the f16 cache, or `2.5GiB@131072`, bytes at a context."""
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).partition(" expected ")[2]) from None


def _times(text: str) -> Path | None:
    """argparse type: `auto`, a name of SHIPPED or a file."""
    return None if text == "auto" else Path(text)


def resolved(
    options: Mapping[str, Any], spec: ModelSpec, window: int = Recipe.calib_window
) -> Mapping[str, Any]:
    """The options with how many latest tokens stay exact, if they leave it open: at most a quarter of a
    calibration window, a 32nd of the trained context and a 64th of the budget's. In layers that see a window
    more of them would be most of the cache."""
    if options["recent"] is not None:
        return options
    context = options["kv_budget"].context(options["served_context"] or SHARE_CONTEXT)
    sees_all = not any(spec.window(layer) for layer in spec.attention_layers)
    least, most = RECENT
    n = min(context // 64, spec.n_ctx // 32, window // 4, most) if sees_all and spec.mla is None else least
    return {**options, "recent": max(n // least, 1) * least}


def create(options: Mapping[str, Any], spec: ModelSpec) -> Waterfill:
    """Raises:
    ConvertError: a group, context or budget that does not fit the model, or no file of times.
    """
    options = resolved(options, spec)
    groupings = _groupings(options["group"], options["group_v"], spec)
    for group in groupings[0].values():
        if group * spec.head_dim % RANK_PAD:
            raise ConvertError(
                "--group", f"groups whose width is a multiple of {RANK_PAD}", str(group * spec.head_dim)
            )
    if options["one_row"] and not spec.block.value_of_key:
        raise ConvertError("--one-row", "a model that makes V of keys in some layer", spec.gguf_arch)
    served, sink, recent = options["served_context"], options["sink"], options["recent"]
    if served is not None and served <= sink + recent:
        raise ConvertError(
            "--served-context", f"more than sink {sink} and recent {recent} together", str(served)
        )
    kept = sink > 0 or recent > 0
    in_segments = spec.mla is not None and options["segment"] == 16  # as exact tokens then are, too
    has_own = options["segment"] is not None or spec.mla is not None
    one_scale = options["scales"] == "row" or (options["scales"] is None and not has_own)
    if one_scale and options["segment"] is not None:
        raise ConvertError(
            "--segment", "segments with scales of their own (--scales segment)", "--scales row"
        )
    widths = ROW_WIDTHS if one_scale else SEGMENT_WIDTHS
    if spec.mla is not None and one_scale:
        wanted = "segment for MLA: no factor could give turned channels the spread of others"
        raise ConvertError("--scales", wanted, "row")
    if options["polish"] and (options["master"] or spec.mla is not None):
        option = "--master, whose factors serve many plans" if options["master"] else "MLA"
        raise ConvertError("--polish", "0", f"{options['polish']} with {option}")
    prefer = "speed" if spec.mla is not None else options["prefer"]  # rows are read as they are stored
    path = latent_plan.k_path({"k_path": None}, spec, PREFER[prefer])
    rotates = path == "rotated" and spec.block.position == "rope"
    return Waterfill(
        Shape(
            paths={"k": path, "v": "latent"},
            widths=widths if options["segment"] is None else (options["segment"],),
            sink=sink,
            recent=recent,
            context=(served or spec.n_ctx) if rotates else None,
            one_row=options["one_row"],
            one_scale=one_scale,
            regains=spec.mla is None and not options["master"],
        ),
        groupings=groupings,
        count=allotment.count(
            options["kv_budget"],
            spec,
            served or SHARE_CONTEXT,
            sink,
            recent,
            not options["master"],
            sizes.exact_formats(spec) if kept and not in_segments else sizes.EXACT_FORMATS[:1],
            options["one_row"],
        ),
        share_context=served or SHARE_CONTEXT,
        is_master=options["master"],
        prefer=options["prefer"],
        times=gpu_file.load(options["gpu_times"]),
        depths=DEPTHS + tuple(n for n in (served or spec.n_ctx,) if n > DEPTHS[-1]),
        quick=options["quick"],
    )


def _groupings(k: int | None, v: int | None, spec: ModelSpec) -> tuple[Mapping[str, int], ...]:
    """KV heads of --group and --group-v. A side that is left open has all legal groups of at most GROUP_WIDTH
    channels, from the widest to the narrowest, or the narrowest legal one where none is; both sides alike."""
    legal = [n for n in range(spec.n_kv, 0, -1) if spec.n_kv % n == 0 and n * spec.head_dim % RANK_PAD == 0]
    open_ = [n for n in legal if n * spec.head_dim <= GROUP_WIDTH] or legal[-1:] or [spec.n_kv]
    fixed = {side: group_size(n, spec.n_kv) for side, n in (("k", k), ("v", v)) if n != AUTO}
    return tuple({"k": n, "v": n} | fixed for n in (open_ if len(fixed) < len(SIDES) else open_[:1]))
