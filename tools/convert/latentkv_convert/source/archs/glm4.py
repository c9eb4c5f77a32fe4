"""glm4: GLM-4 0414 (9B, 32B).

Llama's block with norms before and after each branch, RoPE over half of the head, biases on Q, K and V,
packed gate and up projections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ...errors import ConvertError
from ...ir import ModelSpec, Projection, TensorRole
from ..frequencies import paired_rows
from ..stock import Stock
from . import llama

NORMS = {
    "attn_norm.weight": "input_layernorm",
    "post_attention_norm.weight": "post_self_attn_layernorm",
    "ffn_norm.weight": "post_attention_layernorm",
    "post_ffw_norm.weight": "post_mlp_layernorm",
}


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    config = {"head_dim": 128, "rms_norm_eps": 1.5625e-7, "attention_bias": True, **config}
    whole = {"rope_scaling": None, "rope_parameters": None, "mlp_bias": False}
    spec = llama.model_spec({**config, **whole})
    spec = llama.partly_rotated(spec, config, 0.5)
    # a checkpoint's planes are those of the file
    rows = {
        side: np.argsort(paired_rows(heads, spec.head_dim, spec.n_rot))
        for side, heads in (("q", spec.n_head), ("k", spec.n_kv))
    }
    query = [role for role in spec.layer_tensors if role.target.startswith("attn_q.")]
    return replace(
        spec,
        gguf_arch="glm4",
        projections={side: Projection(f"self_attn.{side}_proj", rows.get(side)) for side in "qkv"},
        layer_tensors=(
            *(TensorRole(f"{source}.weight", target, "vector") for target, source in NORMS.items()),
            *(replace(role, rows=rows["q"]) for role in query),
            TensorRole("self_attn.o_proj.weight", "attn_output.weight"),
            TensorRole("mlp.gate_up_proj.weight", "ffn_up.weight"),
            TensorRole("mlp.down_proj.weight", "ffn_down.weight"),
        ),
    )


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    if any(stock.values.get("rope.dimension_sections") or ()):
        raise ConvertError(stock.where, "one position a token", "rope.dimension_sections of several")
    return llama.config_of(stock)
