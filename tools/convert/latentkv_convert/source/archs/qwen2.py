"""qwen2: Qwen 1.5, 2, 2.5 and models built on them.

Llama's block with biases on Q, K and V."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...errors import ConvertError
from ...ir import ModelSpec, TensorRole
from ..stock import Stock
from . import llama, window_keys


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    spec = llama.model_spec({**config, "attention_bias": False})
    bias = TensorRole("self_attn.q_proj.bias", "attn_q.bias", "vector", rope_heads=spec.n_head)
    return replace(
        spec,
        gguf_arch="qwen2",
        block=replace(spec.block, rope_pairing="neox"),
        layer_tensors=(*spec.layer_tensors, bias),
        keys={**spec.keys, **window_keys(window(config))},
    )


def window(config: Mapping[str, Any]) -> int | None:
    """The sliding window of every layer, or None.

    Raises:
        ConvertError: only some of the layers have one.
    """
    if not config.get("use_sliding_window", False):
        return None
    n_layer, first = int(config["num_hidden_layers"]), int(config.get("max_window_layers", 28))
    kinds = config.get("layer_types") or ["sliding_attention" if i >= first else "" for i in range(n_layer)]
    sliding = sum(kind == "sliding_attention" for kind in kinds)
    if 0 < sliding < n_layer:
        raise ConvertError(
            "config.json", "a sliding window in all layers or in none", f"{sliding} of {n_layer}"
        )
    return int(config.get("sliding_window") or 4096) if sliding else None


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    return llama.config_of(stock)
