"""glm4_moe: GLM-4.5, 4.6 and 4.7 with experts (106B-A12B, 355B-A32B).

Llama's block with biases on Q, K and V, norms on query and key heads in the larger model, RoPE on half a
head, and experts in all but the first layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ....errors import ConvertError
from ....ir import ModelSpec
from ...stock import Stock
from .. import QK_NORMS, llama, require, routed, seed_oss

ARCHITECTURE = "glm4moe"
STOCK_KEYS = routed.STOCK_KEYS


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    require(config, "n_group", 1, 1)
    config = {"first_k_dense_replace": 1, "rms_norm_eps": 1e-5, **config}
    whole = {"rope_scaling": None, "rope_parameters": None, "mlp_bias": False}
    spec = llama.model_spec({**config, **whole})
    spec = replace(
        llama.partly_rotated(spec, config, 0.5),
        gguf_arch="glm4moe",
        block=replace(spec.block, rope_pairing="neox"),
        layer_tensors=(
            *seed_oss.with_post_norm(spec, {"attn_output.bias"}),
            *(QK_NORMS if config.get("use_qk_norm") else ()),
        ),
    )
    return routed.shared_of_several(config, spec)


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    if any(stock.values.get("rope.dimension_sections") or ()):
        raise ConvertError(stock.where, "one position a token", "rope.dimension_sections of several")
    routed.require_sigmoid(stock)
    has_norms = stock.has("attn_q_norm.weight")
    return {**llama.config_of(stock), **routed.several_of_stock(stock), "use_qk_norm": has_norms}
