"""qwen3: Qwen 3 (dense).

Llama's block with an RMS norm on every query and key head before RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...ir import ModelSpec
from ..stock import Stock
from . import QK_NORMS, llama, qwen2, window_keys


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    spec = llama.model_spec({"head_dim": 128, **config})
    return replace(
        spec,
        gguf_arch="qwen3",
        block=replace(spec.block, rope_pairing="neox"),
        layer_tensors=(*spec.layer_tensors, *QK_NORMS),
        keys={**spec.keys, **window_keys(qwen2.window(config))},
    )


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    return llama.config_of(stock)
