"""lfm2: LFM2, LFM2.5.

Most layers are short convolutions, and all have Llama's FFN."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .... import limits
from ....ir import ModelSpec
from ...stock import Stock
from .. import short_conv


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    return short_conv.model_spec({**config, "intermediate_size": _ffn_width(config)}, "lfm2")


def _ffn_width(config: Mapping[str, Any]) -> int:
    """As transformers makes it of the config's: two thirds, times a factor, in whole multiples."""
    width = int(config.get("block_ff_dim", config["intermediate_size"]))
    if not config.get("block_auto_adjust_ff_dim", True):
        return width
    width = 2 * width // 3
    factor = config.get("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return width
    width = int(limits.number("config.json", "block_ffn_dim_multiplier", factor, *limits.SCALE) * width)
    unit = int(
        limits.number("config.json", "block_multiple_of", config.get("block_multiple_of", 256), 1, 1 << 22)
    )
    return -(-width // unit) * unit


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    return {**short_conv.config_of(stock), "block_auto_adjust_ff_dim": False}
