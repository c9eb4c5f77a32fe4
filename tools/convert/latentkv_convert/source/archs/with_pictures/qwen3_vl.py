"""qwen3_vl: Qwen3-VL, dense (2B to 32B), text.

Qwen 3's block: tokens of text have the same number in all three of their positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....ir import ModelSpec
from ...stock import Stock
from .. import qwen3
from . import qwen2_vl

ARCHITECTURE = "qwen3vl"
TEXT_PREFIX = qwen2_vl.TEXT_PREFIX


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    return qwen2_vl.with_sections(config, qwen3.model_spec(qwen2_vl.of_text(config)), "qwen3vl")


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    return qwen3.config_of(stock) | qwen2_vl.sections_of(stock)
