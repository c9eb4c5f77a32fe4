"""phi3: Phi-3, 3.5, 4 and their mini forms.

Llama's block with packed QKV and packed gate and up projections, long RoPE, RoPE over part of the head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...ir import BlockSpec, ModelSpec, Projection, TensorRole
from .. import rope
from ..stock import Stock
from . import activation, packed_rows, tables, window_keys

TINY: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "original_max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0 + 0.05 * i for i in range(16)],
        "long_factor": [1.0 + 0.6 * i for i in range(16)],
    },
    "sliding_window": None,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    n_embd, n_head = int(config["hidden_size"]), int(config["num_attention_heads"])
    n_kv = int(config.get("num_key_value_heads") or n_head)
    head_dim = int(config.get("head_dim") or n_embd // n_head)
    n_rot = int(head_dim * rope.rotated_share(config, 1.0))
    positions = rope.describe(config, n_rot)
    n_ctx = int(config["max_position_embeddings"])
    rows = packed_rows(n_head, n_kv, head_dim, interleaved=False)
    layer = (
        TensorRole("input_layernorm.weight", "attn_norm.weight", "vector"),
        TensorRole("self_attn.o_proj.weight", "attn_output.weight"),
        TensorRole("post_attention_layernorm.weight", "ffn_norm.weight", "vector"),
        TensorRole("mlp.gate_up_proj.weight", "ffn_up.weight"),
        TensorRole("mlp.down_proj.weight", "ffn_down.weight"),
    )
    return ModelSpec(
        gguf_arch="phi3",
        n_layer=int(config["num_hidden_layers"]),
        n_embd=n_embd,
        n_head=n_head,
        n_kv=n_kv,
        head_dim=head_dim,
        n_rot=n_rot,
        n_vocab=int(config["vocab_size"]),
        n_ctx=n_ctx,
        block=BlockSpec(
            norm="rms",
            activation=activation(str(config.get("hidden_act", "silu"))),
            ffn="gated",
            parallel=False,
            position="rope",
            rope_pairing="neox",
        ),
        layers="model.layers",
        projections={side: Projection("self_attn.qkv_proj", rows[side]) for side in "qkv"},
        global_tensors=tuple(tables(config, "model.embed_tokens", "model.norm", tied=False)),
        layer_tensors=layer,
        keys={
            "context_length": n_ctx,
            "embedding_length": n_embd,
            "block_count": int(config["num_hidden_layers"]),
            "feed_forward_length": int(config["intermediate_size"]),
            "attention.head_count": n_head,
            "attention.head_count_kv": n_kv,
            "attention.key_length": head_dim,
            "attention.value_length": head_dim,
            "attention.layer_norm_rms_epsilon": float(config.get("rms_norm_eps", 1e-5)),
            "vocab_size": int(config["vocab_size"]),
            **positions.keys,
            **window_keys(config.get("sliding_window")),
        },
        extra_tensors=positions.tensors,
        latentkv_keys=positions.latentkv_keys,
        packed_qkv=True,
    )


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    epsilon = stock.number("attention.layer_norm_rms_epsilon", 0, 1)
    return {**stock.sizes(), "rms_norm_eps": epsilon, "sliding_window": stock.window()}
