"""olmo2: OLMo 2 (1B, 7B, 13B, 32B).

Llama's block with RMS norms after each branch and none before, and on queries and keys over all of their
heads together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ... import limits
from ...ir import ModelSpec, TensorRole
from ..stock import Stock
from . import LOCAL, layer_types, llama, require

NORMS = {
    "attn_q_norm.weight": "self_attn.q_norm",
    "attn_k_norm.weight": "self_attn.k_norm",
    "post_attention_norm.weight": "post_attention_layernorm",
    "post_ffw_norm.weight": "post_feedforward_layernorm",
}
PERIOD = 4  # of OLMo 3, whose files have this architecture: the last of so many layers has no window
BEFORE = ("attn_norm.weight", "ffn_norm.weight")  # Llama's


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    require(config, "attention_bias", False, False)  # a bias before a norm over all heads
    spec = llama.model_spec({"rms_norm_eps": 1e-5, **config, "mlp_bias": False})
    return replace(
        spec,
        gguf_arch="olmo2",
        block=replace(spec.block, rope_pairing="neox"),
        layer_tensors=(
            *(role for role in spec.layer_tensors if role.target not in BEFORE),
            *(TensorRole(f"{source}.weight", target, "vector") for target, source in NORMS.items()),
        ),
        whole_norms=True,
    )


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it; with windows it is OLMo 3's."""
    config, window = llama.config_of(stock), stock.window()
    if not window:
        return config
    n_layer, base = config["num_hidden_layers"], config["rope_theta"]
    is_local = stock.local_layers(n_layer, PERIOD)
    local_base = stock.number("rope.freq_base_swa", *limits.ROPE_BASE, default=base)
    return {
        **config,
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": layer_types(is_local),
        "rope_parameters": {LOCAL: {"rope_theta": local_base}},
    }
