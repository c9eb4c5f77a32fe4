"""ernie4_5_moe: ERNIE 4.5 with experts.

ERNIE's block, with experts in all but the first layers, chosen by a softmax and a bias."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .... import limits
from ....errors import ConvertError
from ....ir import F32, ModelSpec, TensorRole
from ...stock import Stock
from .. import ernie4_5, require, routed

ARCHITECTURE = "ernie4_5-moe"
STOCK_KEYS = routed.STOCK_KEYS
_FIELDS = {
    "n_expert": "moe_num_experts",
    "n_used": "moe_k",
    "width": "moe_intermediate_size",
    "n_dense": "moe_layer_start_index",
}
_BIAS = "mlp.moe_statics.e_score_correction_bias"
_STEP = "interleave_moe_layer_step"


def _of_layer(bias: F32) -> F32:
    """[1, n_expert] -> [n_expert]"""
    return bias.reshape(-1)


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    config = {"moe_layer_start_index": 1, "moe_num_shared_experts": 2, "moe_k": 6, **config}
    n_layer, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
    require(config, "moe_layer_interval", 1, 1)
    require(config, "moe_layer_end_index", -1, -1, n_layer - 1)
    width = {"head_dim": int(config.get("head_dim") or config["hidden_size"] // heads)}
    experts = routed.of_config(config, _FIELDS, scores="softmax")
    n_shared = int(
        limits.number("config.json", "moe_num_shared_experts", config["moe_num_shared_experts"] or 0, 0, 256)
    )
    spec = replace(ernie4_5.model_spec({**config, **width}), gguf_arch=ARCHITECTURE)
    spec = routed.with_experts(
        spec, replace(experts, shared=n_shared * experts.width), routed.Names(bias=_BIAS)
    )
    return replace(
        spec,
        layer_tensors=tuple(_flat(role) for role in spec.layer_tensors),
        keys={**spec.keys, "expert_shared_count": n_shared, _STEP: 1},
    )


def _flat(role: TensorRole) -> TensorRole:
    return replace(role, transform=_of_layer) if role.source == _BIAS else role


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    if stock.whole(_STEP, 1, 1 << 16, 1) != 1:
        raise ConvertError(stock.where, f"{_STEP} 1", str(stock.values[_STEP]))
    if (gating := routed.gating_of(stock, "softmax")) != "softmax":
        raise ConvertError(stock.where, "expert_gating_func 1 (softmax)", gating)
    found = routed.of_stock(stock, {**_FIELDS, "shared": "shared", "is_normed": "is_normed"})
    if not stock.values.get("expert_weights_norm", found.pop("is_normed") or True):
        raise ConvertError(stock.where, "expert_weights_norm true", "false")
    return {
        **ernie4_5.config_of(stock),
        **found,
        "moe_num_shared_experts": found.pop("shared") // found["moe_intermediate_size"],
    }
