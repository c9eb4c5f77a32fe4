"""afmoe: Arcee Trinity Nano, Mini and Large.

Qwen 3's attention with a gate of each number of its output; three of four layers have a sliding window, and
the others no RoPE. Norms before and after both branches, and experts in all but the first layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .... import limits
from ....ir import ModelSpec, TensorRole
from ...stock import Stock
from .. import layer_types, llama, local_layers, qwen3, require, routed, warn_of_readers

STOCK_KEYS = routed.STOCK_KEYS
_PERIOD = 4  # of so many layers the last has no window and no RoPE
_FIELDS = {
    "n_expert": "num_experts",
    "n_used": "num_experts_per_tok",
    "width": "moe_intermediate_size",
    "is_normed": "route_norm",
    "scale": "route_scale",
    "n_dense": "num_dense_layers",
}
_NAMES = routed.Names(router="mlp.router.gate.weight", bias="mlp.expert_bias")
_TENSORS = {
    "self_attn.gate_proj.weight": ("attn_gate.weight", "weight"),
    "post_attention_layernorm.weight": ("post_attention_norm.weight", "vector"),
    "pre_mlp_layernorm.weight": ("ffn_norm.weight", "vector"),
    "post_mlp_layernorm.weight": ("post_ffw_norm.weight", "vector"),
}


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    usual = {"num_dense_layers": 1, "route_norm": True, "rms_norm_eps": 1e-5, "head_dim": 128}
    config = {**usual, **config}
    require(config, "attention_bias", False, False)
    require(config, "score_func", "sigmoid", "sigmoid", None)
    for name in ("n_group", "topk_group"):
        require(config, name, 1, 1, None)
    n_layer = int(config["num_hidden_layers"])
    period = int(limits.number("config.json", "layers", config.get("global_attn_every_n_layers", 4), 1, 4096))
    is_local = local_layers(config, [(layer + 1) % period != 0 for layer in range(n_layer)])
    window = int(limits.number("config.json", "sliding_window", config["sliding_window"], *limits.WINDOW))
    if is_local != [(layer + 1) % _PERIOD != 0 for layer in range(n_layer)]:
        warn_of_readers(f"a window in all but every fourth layer of {n_layer}, for stock readers of afmoe")
    spec = qwen3.model_spec({**config, "mlp_bias": False, "use_sliding_window": False})
    base = float(spec.keys["rope.freq_base"])
    spec = replace(
        spec,
        gguf_arch="afmoe",
        block=replace(
            spec.block,
            gate="sigmoid",
            embedding_scale=math.sqrt(spec.n_embd) if config.get("mup_enabled") else 1.0,
            windows=tuple(window if local else 0 for local in is_local),
            rope_bases=tuple(base if local else 0.0 for local in is_local),
        ),
        layer_tensors=(
            *(role for role in spec.layer_tensors if role.target != "ffn_norm.weight"),
            *(TensorRole(name, *target) for name, target in _TENSORS.items()),
        ),
        keys={**spec.keys, "attention.sliding_window": window},
    )
    if not config.get("mup_enabled"):
        warn_of_readers("mup_enabled true, for stock readers of afmoe", "false")
    experts = routed.of_config(config, _FIELDS)
    n_shared = int(limits.number("config.json", "num_shared_experts", config["num_shared_experts"], 0, 256))
    spec = routed.with_experts(spec, replace(experts, shared=n_shared * experts.width), _NAMES)
    return replace(spec, keys={**spec.keys, "expert_shared_count": n_shared})


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    config = llama.config_of(stock)
    is_local = stock.local_layers(config["num_hidden_layers"], _PERIOD)
    found = routed.of_stock(stock, {**_FIELDS, "shared": "shared"})
    routed.require_sigmoid(stock)
    return {
        **config,
        **found,
        "num_shared_experts": found.pop("shared") // found["moe_intermediate_size"],
        "sliding_window": stock.whole("attention.sliding_window", 1, limits.WINDOW[1]),
        "layer_types": layer_types(is_local),
        "mup_enabled": True,
    }
