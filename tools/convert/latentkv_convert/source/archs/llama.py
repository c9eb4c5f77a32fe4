"""llama: Llama 1, 2, 3.x, Yi, LongChat, TinyLlama, SmolLM.

RMS norm, gated FFN, RoPE in the GGUF's paired row order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...errors import ConvertError
from ...ir import BlockSpec, ModelSpec, Projection, TensorRole
from .. import rope
from ..stock import Stock
from . import activation, tables


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    n_head = int(config["num_attention_heads"])
    n_kv = int(config.get("num_key_value_heads") or n_head)
    head_dim = int(config.get("head_dim") or config["hidden_size"] // n_head)
    if rope.parameters(config).get("partial_rotary_factor", 1.0) != 1.0:
        raise ConvertError("config.json", "RoPE over the whole head", "a partial_rotary_factor below 1")
    positions = rope.describe(config, head_dim)
    mlp_bias = bool(config.get("mlp_bias"))
    layer = [
        TensorRole("input_layernorm.weight", "attn_norm.weight", "vector"),
        TensorRole("self_attn.q_proj.weight", "attn_q.weight", rope_heads=n_head),
        TensorRole("self_attn.o_proj.weight", "attn_output.weight"),
        TensorRole("post_attention_layernorm.weight", "ffn_norm.weight", "vector"),
    ]
    if config.get("attention_bias"):
        layer += [
            TensorRole("self_attn.q_proj.bias", "attn_q.bias", "vector", rope_heads=n_head),
            TensorRole("self_attn.o_proj.bias", "attn_output.bias", "vector"),
        ]
    for name in ("gate", "up", "down"):
        layer.append(TensorRole(f"mlp.{name}_proj.weight", f"ffn_{name}.weight"))
        if mlp_bias:
            layer.append(TensorRole(f"mlp.{name}_proj.bias", f"ffn_{name}.bias", "vector"))
    return ModelSpec(
        gguf_arch="llama",
        n_layer=int(config["num_hidden_layers"]),
        n_embd=int(config["hidden_size"]),
        n_head=n_head,
        n_kv=n_kv,
        head_dim=head_dim,
        n_rot=head_dim,
        n_vocab=int(config["vocab_size"]),
        n_ctx=int(config["max_position_embeddings"]),
        block=BlockSpec(
            norm="rms",
            activation=activation(str(config.get("hidden_act", "silu"))),
            ffn="gated",
            parallel=False,
            position="rope",
            rope_pairing="norm",
        ),
        layers="model.layers",
        projections={side: Projection(f"self_attn.{side}_proj") for side in "qkv"},
        global_tensors=tuple(tables(config, "model.embed_tokens", "model.norm", tied=False)),
        layer_tensors=tuple(layer),
        keys={
            "feed_forward_length": int(config["intermediate_size"]),
            "attention.head_count_kv": n_kv,
            "attention.key_length": head_dim,
            "attention.value_length": head_dim,
            "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
            "vocab_size": int(config["vocab_size"]),
            **positions.keys,
        },
        extra_tensors=positions.tensors,
        latentkv_keys=positions.latentkv_keys,
    )


def partly_rotated(spec: ModelSpec, config: Mapping[str, Any], usual: float, n_rot: int = 0) -> ModelSpec:
    """With RoPE as the config describes it, over a part of a head. usual: its share where the config does not
    say; n_rot: its channels where it does."""
    n_rot = n_rot or int(spec.head_dim * rope.rotated_share(config, usual))
    positions = rope.describe(config, n_rot)
    return replace(
        spec,
        n_rot=n_rot,
        keys={**spec.keys, **positions.keys},
        extra_tensors=positions.tensors,
        latentkv_keys=positions.latentkv_keys,
    )


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    return {
        **stock.sizes(),
        "rms_norm_eps": stock.number("attention.layer_norm_rms_epsilon", 0, 1),
        "attention_bias": stock.has("attn_q.bias"),
        "mlp_bias": stock.has("ffn_up.bias"),
    }
