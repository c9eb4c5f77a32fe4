"""qwen3_vl: Qwen3-VL, dense (2B to 32B), text.

Qwen 3's block: tokens of text have the same number in all three of their positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....ir import ModelSpec
from ...stock import Stock
from . import qwen2_vl, qwen3

ARCHITECTURE = "qwen3vl"
TEXT_PREFIX = qwen2_vl.TEXT_PREFIX
TINY: dict[str, Any] = {
    **qwen3.TINY,
    "model_type": "qwen3_vl_text",
    "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [6, 5, 5]},
}


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    return qwen2_vl.with_sections(config, qwen3.model_spec(qwen2_vl.of_text(config)), "qwen3vl")


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    return qwen3.config_of(stock) | qwen2_vl.sections_of(stock)
