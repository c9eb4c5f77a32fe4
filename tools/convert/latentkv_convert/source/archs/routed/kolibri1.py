"""kolibri1: Kolibri 1.

Qwen 3's attention with norms before and after both branches; four of five layers have a sliding window, and
the others no RoPE. All layers have experts, which are chosen before a sigmoid makes their scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .... import limits
from ....errors import ConvertError
from ....ir import ModelSpec, TensorRole
from ...stock import Stock
from .. import glm4, layer_types, llama, local_layers, qwen3, routed

STOCK_KEYS = routed.STOCK_KEYS
_PERIOD = 5  # of so many layers the last has no window and no RoPE
_FIELDS = {
    "n_expert": "num_experts",
    "n_used": "num_experts_per_tok",
    "width": "moe_intermediate_size",
    "shared": "shared_expert_intermediate_size",
    "is_normed": "norm_topk_prob",
}
_NAMES = routed.Names(bias="moe.router.expert_bias")
_RENAMED = {"post_self_attn_layernorm": "post_attn_norm", "post_mlp_layernorm": "post_ffn_norm"}


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    config = {"rms_norm_eps": 1e-6, "norm_topk_prob": False, **config}
    n_layer = int(config["num_hidden_layers"])
    is_local = local_layers(config, [(layer + 1) % _PERIOD != 0 for layer in range(n_layer)])
    window = config.get("sliding_window", 513)
    if not window:
        raise ConvertError("config.json", "a sliding_window", "none")
    window = int(limits.number("config.json", "sliding_window", window, *limits.WINDOW))
    plain = {"attention_bias": False, "mlp_bias": False, "use_sliding_window": False}
    experts = routed.of_config(config, _FIELDS)
    spec = qwen3.model_spec({**config, **plain, "intermediate_size": experts.width})
    base = float(spec.keys["rope.freq_base"])
    norms = {target: _RENAMED.get(source, source) for target, source in glm4.NORMS.items()}
    spec = replace(
        spec,
        gguf_arch="kolibri1",
        block=replace(
            spec.block,
            ranked_before_sigmoid=True,
            windows=tuple(window if local else 0 for local in is_local),
            rope_bases=tuple(base if local else 0.0 for local in is_local),
        ),
        layer_tensors=(
            *(role for role in spec.layer_tensors if role.target not in norms),
            *(TensorRole(f"{source}.weight", target, "vector") for target, source in norms.items()),
        ),
        keys={
            **spec.keys,
            "attention.sliding_window": window,
            "attention.sliding_window_pattern": list(is_local),
        },
    )
    return routed.with_experts(spec, experts, _NAMES)


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    routed.require_sigmoid(stock)
    config = llama.config_of(stock)
    return {
        **config,
        **routed.of_stock(stock, _FIELDS),
        "sliding_window": stock.window(),
        "layer_types": layer_types(stock.local_layers(config["num_hidden_layers"], _PERIOD)),
    }
