"""falcon: Falcon 7B, 40B, 180B and 11B.

7B has one KV head; 40B and 180B have the new decoder architecture with two input norms, 11B the same with
one. Attention and FFN in parallel, packed QKV."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import ConvertError, warn
from ...ir import BlockSpec, ModelSpec, Projection, TensorRole
from .. import rope
from ..stock import Stock
from . import activation, packed_rows, require, tables


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    is_new = bool(config.get("new_decoder_architecture", False))
    require(config, "alibi", False, False, None)
    if not is_new and not config.get("parallel_attn", True):
        raise ConvertError("config.json", "parallel_attn true", "false")
    n_embd, n_head = int(config["hidden_size"]), int(config["num_attention_heads"])
    n_kv = 1 if not is_new and config.get("multi_query", True) else int(config.get("num_kv_heads") or n_head)
    if n_kv < 1 or n_head % n_kv:
        raise ConvertError("config.json", "query heads divisible by num_kv_heads", f"{n_head} and {n_kv}")
    head_dim = n_embd // n_head
    n_ctx = int(config.get("max_position_embeddings", 2048))
    positions = rope.describe({**config, "max_position_embeddings": n_ctx}, head_dim)
    norms = [("input_layernorm", "attn_norm")]
    if is_new and config.get("num_ln_in_parallel_attn") in (None, 2):
        norms = [("ln_mlp", "attn_norm"), ("ln_attn", "attn_norm_2")]
    linears = [
        ("self_attention.dense", "attn_output"),
        ("mlp.dense_h_to_4h", "ffn_up"),
        ("mlp.dense_4h_to_h", "ffn_down"),
    ]
    layer = [
        TensorRole(f"{source}.{part}", f"{target}.{part}", "vector")
        for source, target in norms
        for part in ("weight", "bias")
    ]
    layer += [TensorRole(f"{source}.weight", f"{target}.weight") for source, target in linears]
    if config.get("bias", False):
        warn(
            "config.json",
            "bias false, for stock readers of the falcon architecture",
            "true",
            "this runtime adds them; a reader that knows none will refuse the file",
        )
        layer += [TensorRole(f"{source}.bias", f"{target}.bias", "vector") for source, target in linears]
    rows = packed_rows(n_head, n_kv, head_dim, interleaved=True)
    return ModelSpec(
        gguf_arch="falcon",
        n_layer=int(config["num_hidden_layers"]),
        n_embd=n_embd,
        n_head=n_head,
        n_kv=n_kv,
        head_dim=head_dim,
        n_rot=head_dim,
        n_vocab=int(config["vocab_size"]),
        n_ctx=n_ctx,
        block=BlockSpec(
            norm="layer",
            activation=activation(str(config.get("activation") or "gelu")),
            ffn="plain",
            parallel=True,
            position="rope",
            rope_pairing="neox",
        ),
        layers="transformer.h",
        projections={side: Projection("self_attention.query_key_value", rows[side]) for side in "qkv"},
        global_tensors=tuple(
            tables(config, "transformer.word_embeddings", "transformer.ln_f", ("weight", "bias"))
        ),
        layer_tensors=tuple(layer),
        keys={
            "feed_forward_length": int(config.get("ffn_hidden_size") or 4 * n_embd),
            "attention.head_count_kv": n_kv,
            "attention.layer_norm_epsilon": float(config.get("layer_norm_epsilon", 1e-5)),
            **positions.keys,
        },
        extra_tensors=positions.tensors,
        latentkv_keys=positions.latentkv_keys,
        packed_qkv=True,
    )


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    sizes = stock.sizes()
    return {
        **sizes,
        "ffn_hidden_size": sizes["intermediate_size"],
        "num_kv_heads": sizes["num_key_value_heads"],
        "new_decoder_architecture": True,
        "num_ln_in_parallel_attn": 2 if stock.has("attn_norm_2.weight") else 1,
        "bias": stock.has("attn_output.bias"),
        "layer_norm_epsilon": stock.number("attention.layer_norm_epsilon", 0, 1),
    }
