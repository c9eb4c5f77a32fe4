"""phi3: Phi-3, 3.5, 4 and their mini forms.

Llama's block with packed QKV and packed gate and up projections, long RoPE, RoPE over part of the head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...ir import ModelSpec, Projection, TensorRole
from ..stock import Stock
from . import llama, packed_rows, window_keys


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    whole = {"rope_scaling": None, "rope_parameters": None, "partial_rotary_factor": 1.0}
    no_bias = {"attention_bias": False, "mlp_bias": False}
    spec = llama.model_spec({"rms_norm_eps": 1e-5, **config, **whole, **no_bias})
    spec = llama.partly_rotated(spec, config, 1.0)
    rows = packed_rows(spec.n_head, spec.n_kv, spec.head_dim, interleaved=False)
    return replace(
        spec,
        gguf_arch="phi3",
        block=replace(spec.block, rope_pairing="neox"),
        projections={side: Projection("self_attn.qkv_proj", rows[side]) for side in "qkv"},
        layer_tensors=(
            TensorRole("input_layernorm.weight", "attn_norm.weight", "vector"),
            TensorRole("self_attn.o_proj.weight", "attn_output.weight"),
            TensorRole("post_attention_layernorm.weight", "ffn_norm.weight", "vector"),
            TensorRole("mlp.gate_up_proj.weight", "ffn_up.weight"),
            TensorRole("mlp.down_proj.weight", "ffn_down.weight"),
        ),
        keys={**spec.keys, **window_keys(config.get("sliding_window"))},
        packed_qkv=True,
    )


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    epsilon = stock.number("attention.layer_norm_rms_epsilon", 0, 1)
    return {**stock.sizes(), "rms_norm_eps": epsilon, "sliding_window": stock.window()}
