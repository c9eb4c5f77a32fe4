"""exaone_moe: K-EXAONE.

Qwen 3's attention; three of four layers have a sliding window, and the others no RoPE. All but the first
layers have experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .... import limits
from ....errors import ConvertError
from ....ir import ModelSpec
from ...stock import Stock
from .. import layer_types, llama, local_layers, qwen3, routed
from ..exaone4 import pattern_of

ARCHITECTURE = "exaone-moe"
STOCK_KEYS = (*routed.STOCK_KEYS, "expert_group_count")
_PERIOD = 4  # of so many layers the last has no window and no RoPE
_FIELDS = {**routed.SEVERAL, "n_expert": "num_experts"}
_NAMES = routed.Names(bias="mlp.e_score_correction_bias")


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    usual = {"first_k_dense_replace": 1, "num_shared_experts": 1, "rms_norm_eps": 1e-5}
    plain = {"attention_bias": False, "mlp_bias": False}
    config = {**usual, "routed_scaling_factor": 2.5, **config}
    n_layer = int(config["num_hidden_layers"])
    if not config.get("sliding_window", 4096):
        raise ConvertError("config.json", "a sliding_window, for readers of exaone-moe", "none")
    window = int(
        limits.number("config.json", "sliding_window", config.get("sliding_window", 4096), *limits.WINDOW)
    )
    is_local = local_layers(config, pattern_of(config.get("sliding_window_pattern") or _PERIOD, n_layer))
    heads = int(config["num_attention_heads"])
    width = {"head_dim": int(config.get("head_dim") or config["hidden_size"] // heads)}
    spec = qwen3.model_spec({**config, **plain, **width, "use_sliding_window": False})
    base = float(spec.keys["rope.freq_base"])
    spec = replace(
        spec,
        gguf_arch=ARCHITECTURE,
        block=replace(
            spec.block,
            windows=tuple(window if local else 0 for local in is_local),
            rope_bases=tuple(base if local else 0.0 for local in is_local),
        ),
        keys={
            **spec.keys,
            "attention.sliding_window": window,
            "attention.sliding_window_pattern": list(is_local),
        },
    )
    sparse = config.get("mlp_layer_types")
    n_dense = config["first_k_dense_replace"] if sparse is None else routed.dense_layers(sparse)
    experts = routed.of_config({**config, "first_k_dense_replace": n_dense}, _FIELDS)
    n_shared = int(limits.number("config.json", "num_shared_experts", config["num_shared_experts"], 1, 256))
    spec = routed.with_experts(spec, replace(experts, shared=n_shared * experts.width), _NAMES)
    groups = routed.groups(config, experts)
    return replace(spec, keys={**spec.keys, "expert_shared_count": n_shared, **groups})


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    routed.require_sigmoid(stock)
    config = llama.config_of(stock)
    n_layer = config["num_hidden_layers"]
    found = routed.of_stock(stock, {**_FIELDS, "shared": "shared"})
    return {
        **config,
        **found,
        **routed.groups_of_stock(stock),
        "num_shared_experts": max(1, found.pop("shared") // found["moe_intermediate_size"]),
        "sliding_window": stock.window(),
        "layer_types": layer_types(stock.local_layers(n_layer, _PERIOD)),
    }
