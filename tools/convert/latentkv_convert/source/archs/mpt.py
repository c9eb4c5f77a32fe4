"""mpt: MPT 7B and 30B.

ALiBi, packed QKV that may be clipped, layer norms and linears without biases, exact GELU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ... import limits
from ...errors import ConvertError
from ...ir import BlockSpec, ModelSpec, Projection, TensorRole
from ..stock import Stock
from . import packed_rows, require, tables


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    attention: Mapping[str, Any] = config.get("attn_config") or {}
    n_embd, n_head = int(config["d_model"]), int(config["n_heads"])
    head_dim, n_ctx = n_embd // n_head, int(config["max_seq_len"])
    require(config, "no_bias", True, True)
    require(config, "expansion_ratio", 4, 4)
    require(config, "norm_type", "low_precision_layernorm", "low_precision_layernorm", "layernorm")
    require(config, "logit_scale", None, None)
    require(attention, "attn_type", "multihead_attention", "multihead_attention")
    require(attention, "alibi", True, True)
    require(attention, "alibi_bias_max", 8, 8)  # what transformers computes whatever the field says
    require(attention, "qk_ln", False, False)
    require(attention, "prefix_lm", False, False)
    scale = attention.get("softmax_scale")
    if scale is not None and abs(float(scale) * head_dim**0.5 - 1) > 1e-6:
        raise ConvertError("config.json", f"softmax_scale 1/sqrt({head_dim})", str(scale))
    clip = attention.get("clip_qkv")
    if clip is not None:
        clip = limits.number("config.json", "clip_qkv", clip, *limits.CLIP)
    rows = packed_rows(n_head, n_head, head_dim, interleaved=False)
    return ModelSpec(
        gguf_arch="mpt",
        n_layer=int(config["n_layers"]),
        n_embd=n_embd,
        n_head=n_head,
        n_kv=n_head,
        head_dim=head_dim,
        n_rot=0,
        n_vocab=int(config["vocab_size"]),
        n_ctx=n_ctx,
        block=BlockSpec(
            norm="layer",
            activation="gelu",
            ffn="plain",
            parallel=False,
            position="alibi",
            rope_pairing="norm",
        ),
        layers="transformer.blocks",
        projections={side: Projection("attn.Wqkv", rows[side]) for side in "qkv"},
        global_tensors=tuple(tables(config, "transformer.wte", "transformer.norm_f")),
        layer_tensors=(
            TensorRole("norm_1.weight", "attn_norm.weight", "vector"),
            TensorRole("attn.out_proj.weight", "attn_output.weight"),
            TensorRole("norm_2.weight", "ffn_norm.weight", "vector"),
            TensorRole("ffn.up_proj.weight", "ffn_up.weight"),
            TensorRole("ffn.down_proj.weight", "ffn_down.weight"),
        ),
        keys={
            "feed_forward_length": 4 * n_embd,
            "attention.layer_norm_epsilon": float(config.get("layer_norm_epsilon", 1e-5)),
            "attention.max_alibi_bias": 8.0,
            **({} if clip is None else {"attention.clamp_kqv": clip}),
        },
        packed_qkv=True,
    )


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    sizes = stock.sizes()
    n_embd = sizes["hidden_size"]
    stock.whole("feed_forward_length", 4 * n_embd, 4 * n_embd)
    stock.whole("attention.head_count_kv", *[sizes["num_attention_heads"]] * 3)
    clip = stock.number("attention.clamp_kqv", *limits.CLIP, default=0.0)
    return {
        "d_model": n_embd,
        "n_heads": sizes["num_attention_heads"],
        "n_layers": sizes["num_hidden_layers"],
        "max_seq_len": sizes["max_position_embeddings"],
        "vocab_size": sizes["vocab_size"],
        "layer_norm_epsilon": stock.number("attention.layer_norm_epsilon", 0, 1),
        "attn_config": {
            "alibi_bias_max": stock.number("attention.max_alibi_bias", 0, 1e6, default=0.0),
            "clip_qkv": clip or None,
        },
        "tie_word_embeddings": sizes["tie_word_embeddings"],
    }
