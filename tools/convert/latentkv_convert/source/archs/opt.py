"""opt: OPT 125M to 66B except 350M, Galactica.

Learned positions, biases, layer norm before each branch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...ir import BlockSpec, ModelSpec, Projection, TensorRole
from ..stock import Stock
from . import activation, require, tables

OFFSET = 2  # rows of the position table before position 0, left over from fairseq's padding index


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    n_embd, n_head = int(config["hidden_size"]), int(config["num_attention_heads"])
    require(config, "do_layer_norm_before", True, True)
    require(config, "word_embed_proj_dim", n_embd, n_embd, None)
    require(config, "_remove_final_layer_norm", False, False)
    require(config, "layer_norm_elementwise_affine", True, True)
    n_ctx = int(config["max_position_embeddings"])
    parts = ("weight", "bias") if config.get("enable_bias", True) else ("weight",)
    kinds = {"weight": "weight", "bias": "vector"}
    norms = [("self_attn_layer_norm", "attn_norm"), ("final_layer_norm", "ffn_norm")]
    linears = [
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.out_proj", "attn_output"),
        ("fc1", "ffn_up"),
        ("fc2", "ffn_down"),
    ]
    layer = [
        TensorRole(f"{source}.{part}", f"{target}.{part}", "vector")
        for source, target in norms
        for part in ("weight", "bias")
    ]
    layer += [
        TensorRole(f"{source}.{part}", f"{target}.{part}", kinds[part])
        for source, target in linears
        for part in parts
    ]
    decoder = "model.decoder"
    positions = np.arange(OFFSET, OFFSET + n_ctx)
    places = TensorRole(f"{decoder}.embed_positions.weight", "position_embd.weight", "vector", rows=positions)
    words = tables(config, f"{decoder}.embed_tokens", f"{decoder}.final_layer_norm", ("weight", "bias"))
    return ModelSpec(
        gguf_arch="opt",
        n_layer=int(config["num_hidden_layers"]),
        n_embd=n_embd,
        n_head=n_head,
        n_kv=n_head,
        head_dim=n_embd // n_head,
        n_rot=0,
        n_vocab=int(config["vocab_size"]),
        n_ctx=n_ctx,
        block=BlockSpec(
            norm="layer",
            activation=activation(str(config.get("activation_function", "relu"))),
            ffn="plain",
            parallel=False,
            position="learned",
            rope_pairing="norm",
        ),
        layers=f"{decoder}.layers",
        projections={side: Projection(f"self_attn.{side}_proj") for side in "qkv"},
        global_tensors=(words[0], places, *words[1:]),
        layer_tensors=tuple(layer),
        keys={
            "feed_forward_length": int(config["ffn_dim"]),
            "attention.layer_norm_epsilon": 1e-5,  # torch's default; the config has no field for it
        },
    )


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    sizes = stock.sizes()
    return {**sizes, "ffn_dim": sizes["intermediate_size"], "enable_bias": stock.has("attn_q.bias")}
