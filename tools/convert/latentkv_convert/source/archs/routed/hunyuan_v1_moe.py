"""hunyuan_v1_moe: Hunyuan A13B (80B-A13B).

The dense model's attention, and in every layer experts beside one of all tokens, as wide as the FFN."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ....errors import ConvertError
from ....ir import ModelSpec
from ...stock import Stock
from .. import routed
from ..normed_heads import hunyuan_v1_dense

ARCHITECTURE = "hunyuan-moe"
STOCK_KEYS = routed.STOCK_KEYS
_FIELDS = {"n_expert": "num_experts", "n_used": "moe_topk", "width": "moe_intermediate_size"}
_NAMES = routed.Names(router="mlp.gate.wg.weight", bias="", shared="mlp.shared_mlp.*_proj.weight")


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    config = {"moe_intermediate_size": config["intermediate_size"], "num_shared_expert": 1, **config}
    fields = (*_FIELDS.values(), "num_shared_expert")
    config |= {name: _of_all_layers(name, config[name]) for name in fields}
    experts = routed.of_config(config, _FIELDS, scores="softmax")
    width = int(config["intermediate_size"]) * int(config["num_shared_expert"])
    spec = replace(hunyuan_v1_dense.model_spec(config), gguf_arch=ARCHITECTURE)
    return routed.with_experts(spec, replace(experts, shared=width), _NAMES)


def _of_all_layers(name: str, value: Any) -> int:
    """The number that a config gives once, or once a layer."""
    values = value if isinstance(value, list) else [value]
    if not values or any(other != values[0] for other in values):
        raise ConvertError("config.json", f"{name} the same in every layer", str(value)[:40])
    return int(values[0])


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    found = routed.of_stock(stock, {**_FIELDS, "shared": "intermediate_size"})
    return {**hunyuan_v1_dense.config_of(stock), **found}
