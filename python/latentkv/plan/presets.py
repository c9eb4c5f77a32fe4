"""Caches by what they are for: names that `kv` takes beside row formats, and what they stand for.

A preset stores K in blocks of 32 tokens, a scale and a minimum per channel of a block, as a few channels of K
are far larger than the others (Qwen2.5's reach hundreds), and one scale per token then rounds the others
away: q4_0 leaves nothing of that model. Tokens wait among the recent ones until their block is full.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from latentkv.errors import LatentKVError, expected
from latentkv.plan.formats import BLOCKS, split_pair
from latentkv.plan.options import SessionOptions

if TYPE_CHECKING:
    from latentkv import _core

# Architectures whose K is known to have such channels: Qwen2.5-Coder-1.5B diverges from f16 by 7.4 nats with
# q4_0, and by 0.001 with q8_0.
LARGE_KEYS = ("qwen2",)
# Tokens kept exact beside blocks by default, the first and the latest. With 32 recent ones c4/q4 loses
# 1.6 times as much.
SINK, RECENT = 4, 128


_warned: set[str] = set()


@dataclass(frozen=True)
class Preset:
    """Row formats of K and V; tokens that are kept exact are those of all blocks. one_row: the format of rows
    that are keys and values in one (MLA). share: of the f16 cache at 32768 tokens; heads of 64 and of 128
    channels are within a point."""

    k: str
    v: str
    one_row: str
    share: str
    about: str
    sink: int = SINK
    recent: int = RECENT

    @property
    def formats(self) -> str:
        return f"{self.k}/{self.v}"


PRESETS = {
    "balanced": Preset("c4", "q6", "q8", "36 %", "a quarter less loss than small"),
    "small": Preset(
        "c4", "q4", "q6", "30 %", "0.001 to 0.003 nats, where q4_0 loses 0.06 and more: start here"
    ),
    "smaller": Preset("c3", "q3", "q5", "24 %", "eight times the loss of small"),
    "smallest": Preset("c2", "q3", "q4", "21 %", "as much loss as q4_0 has with SmolLM2"),
}
SHARES_AT = 32768
SHORTER = "small: 33 to 37 % at 8192"  # on the CPU, and on a GPU, whose exact windows are longer
MODELS = "SmolLM2-135M, Gemma 3 270M and Qwen2.5-Coder-1.5B, weights in f16"  # measured with these
# What llama.cpp calls the other two that anybody should take.
STOCK = {
    "f16": ("100 %", "no loss"),
    "q8_0": ("53 %", "as in llama.cpp: 0.0002 to 0.001 nats"),
}


def choices() -> list[tuple[str, str, str]]:
    """(name, share of f16, what it is for), largest first: what help and errors offer."""
    stock = [(name, *of) for name, of in STOCK.items()]
    return stock + [(name, p.share, p.about) for name, p in PRESETS.items()]


def resolved(model: _core.Model, options: SessionOptions | Mapping[str, Any]) -> SessionOptions:
    """Options in which kv, kv_k and kv_v name row formats alone: a preset, a pair as "c4/q4" and llama.cpp's
    types become what they stand for, and blocks get recent tokens to wait among.

    Raises:
        LatentKVError: an unknown name, a preset of one side, or of a file that has a plan of its own.
    """
    found = SessionOptions.of(options)
    preset = PRESETS.get(found.kv)
    if preset is not None:
        found = _of_preset(model, preset, found)
    elif found.kv:
        both, k, v = (_known(model, name, "kv") for name in split_pair(found.kv))
        if both in BLOCKS:  # which are K's alone
            both, k, v = "", both, f"q{both[1:]}"
        found = replace(found, kv=both, kv_k=found.kv_k or k, kv_v=found.kv_v or v)
    found = replace(found, kv_k=_known(model, found.kv_k, "kv_k"), kv_v=_known(model, found.kv_v, "kv_v"))
    _doubt(model, found.kv_k or found.kv)
    if found.kv_k in BLOCKS and not _keeps_recent(model, found):
        found = replace(found, sink=SINK if found.sink < 0 else found.sink, recent=RECENT)
    return found


def _of_preset(model: _core.Model, preset: Preset, asked: SessionOptions) -> SessionOptions:
    _require_alone(asked)
    _require_plain(model, asked.kv)
    one_row = has_one_row(model)
    return replace(
        asked,
        kv="",
        kv_k=preset.one_row if one_row else preset.k,
        kv_v=preset.one_row if one_row else preset.v,
        sink=preset.sink if asked.sink < 0 else asked.sink,
        recent=asked.recent if _keeps_recent(model, asked) else preset.recent,
    )


def _doubt(model: _core.Model, k: str) -> None:
    """Warns once if a scale per token would round away most of K."""
    architecture = model.metadata.get("general.architecture")
    if architecture not in LARGE_KEYS or not model.is_plain or k in ("", "f32", "f16", "q8", "q8_0", *BLOCKS):
        return
    line = (
        f"warning: [kv] expected --kv small, or q8_0, for {architecture}, whose keys have large biases; got "
        f"{k}, which destroys most of the model's answers"
    )
    if line not in _warned:
        _warned.add(line)
        print(line, file=sys.stderr)


def is_in_blocks(name: str) -> bool:
    """Whether a preset or a row format keeps K in blocks of tokens."""
    return name in BLOCKS or (name in PRESETS and PRESETS[name].k in BLOCKS)


def has_one_row(model: _core.Model) -> bool:
    """Whether full rows are keys and values in one (MLA): they have one format, K's, of single tokens."""
    return any((layer["k"]["path"], layer["v"]["path"]) == ("value", "full") for layer in model.layers)


def _keeps_recent(model: _core.Model, options: SessionOptions) -> bool:
    """Whether it was said how many, be it none: by the caller or by the file."""
    is_asked = max(options.recent, options.recent_ratio) >= 0
    return is_asked or bool(model.regions["recent"] or model.regions["recent_ratio"])


def _known(model: _core.Model, name: str, where: str) -> str:
    from latentkv import _core

    if name in PRESETS:
        raise expected(
            where,
            f"a row format such as {PRESETS[name].formats.split('/')[0]}",
            name,
            f"kv {name} is for K and V together",
        )
    found = name.lower()
    if found and found not in _core.build_info()["formats"]:
        raise unknown(where, name)
    return found


def unknown(where: str, got: str) -> LatentKVError:
    """The error for a cache type that does not exist."""
    if where != "kv":  # of K or V alone, which no preset is
        return expected(where, "a row format such as q8_0 or q4 (docs/cache.md)", repr(got))
    named = ", ".join(name for name, _, _ in choices())
    return expected(where, f"{named}, or row formats such as q4 or c4/q4 (docs/cache.md)", repr(got))


def _require_alone(options: SessionOptions) -> None:
    for side in ("kv_k", "kv_v"):
        if options[side]:
            raise expected(
                "kv", f"no format of K or V beside {options.kv}", f"{side} {options[side]}", "leave one out"
            )


def _require_plain(model: _core.Model, name: str) -> None:
    if not model.is_plain:
        got = f"{name} for a file with a latent cache"
        raise expected("kv", "a row format such as q4", got, "leave it out: the file's own plan is smaller")
