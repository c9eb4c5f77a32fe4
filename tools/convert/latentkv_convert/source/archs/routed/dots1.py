"""dots1: dots.llm1 (142B-A14B).

Norms on query and key heads, as many KV heads as query heads, and experts in all but the first layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ....errors import ConvertError
from ....ir import ModelSpec
from ...stock import Stock
from .. import llama, local_layers, qwen3, require, routed

STOCK_KEYS = routed.STOCK_KEYS


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    for name in ("n_group", "topk_group"):
        require(config, name, 1, 1, None)
    require(config, "attention_bias", False, False)
    if any(local_layers(config, [False] * int(config["num_hidden_layers"]))):
        raise ConvertError("config.json", "layers without a sliding window", "some that have one")
    usual = {"first_k_dense_replace": 0, "rms_norm_eps": 1e-6}
    spec = qwen3.model_spec({**usual, **config, "mlp_bias": False, "use_sliding_window": False})
    return routed.shared_of_several({**usual, **config}, replace(spec, gguf_arch="dots1"))


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    routed.require_sigmoid(stock)
    return llama.config_of(stock) | routed.several_of_stock(stock)
