"""qwen3_5_moe: Qwen 3.5 and 3.6 with experts (35B-A3B and larger)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ....ir import ModelSpec
from ...stock import Stock
from .. import delta_net
from . import qwen3_5

ARCHITECTURE = "qwen35moe"
STOCK_KEYS = ("expert_count", "expert_used_count")
TEXT_PREFIX = qwen3_5.TEXT_PREFIX


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    n_ff = config.get("moe_intermediate_size", 512)
    spec = qwen3_5.model_spec({"intermediate_size": n_ff, **config})
    return delta_net.with_experts(replace(spec, gguf_arch=ARCHITECTURE), config)


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    return {**delta_net.config_of(stock), **delta_net.expert_config_of(stock)}
