"""Architectures of which most layers are gated short convolutions (LFM2); the others attend, with a norm on
every query and key head.

Tensors have the names and layouts of llama.cpp's converter: the last norm is where others have a norm of
embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .... import limits
from ....errors import ConvertError
from ....ir import F32, ModelSpec, TensorRole
from ...recurrent import ShortConvSizes
from ...stock import Stock
from .. import llama, require
from ..state_space import kv_heads

RECURRENT, ATTENDS = "conv", "full_attention"  # kinds of layers in config.json
MAPS = {"gate": "w1", "up": "w3", "down": "w2"}  # of an FFN, by their names in checkpoints
_SOURCES = {
    "attn_norm.weight": "operator_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "attn_output.weight": "self_attn.out_proj.weight",
    **{f"ffn_{name}.weight": f"feed_forward.{of}.weight" for name, of in MAPS.items()},
}
_NORMS = tuple(
    TensorRole(f"self_attn.{side}_layernorm.weight", f"attn_{side}_norm.weight", "vector") for side in "qk"
)


def model_spec(config: Mapping[str, Any], gguf_arch: str) -> ModelSpec:
    """The model without experts; every layer has the FFN that the config's intermediate_size describes."""
    require(config, "conv_bias", False, False)
    tied = config.get("tie_embedding", config.get("tie_word_embeddings", True))
    usual = {"rope_theta": 1e6, "num_key_value_heads": 8, "max_position_embeddings": 128000}
    own = {"rms_norm_eps": float(config.get("norm_eps", 1e-5)), "tie_word_embeddings": tied}
    plain = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    spec = llama.model_spec({**usual, **config, **own, **plain})
    kinds = layer_kinds(config, spec.n_layer)
    kernel = int(limits.number("config.json", "conv_L_cache", config.get("conv_L_cache", 3), 2, 16))
    roles = tuple(replace(r, source=_SOURCES.get(r.target, r.source)) for r in spec.layer_tensors)
    attention = ("attn_q.weight", "attn_output.weight")
    return replace(
        spec,
        gguf_arch=gguf_arch,
        block=replace(
            spec.block,
            rope_pairing="neox",
            mixers=tuple("attention" if kind == ATTENDS else "short_conv" for kind in kinds),
        ),
        global_tensors=tuple(
            TensorRole("model.embedding_norm.weight", "token_embd_norm.weight", "vector")
            if role.kind == "vector"
            else role
            for role in spec.global_tensors
        ),
        layer_tensors=(*roles, *_NORMS),
        recurrent_tensors=(*(role for role in roles if role.target not in attention), *_CONVOLUTION),
        keys={
            **spec.keys,
            **ShortConvSizes(spec.n_embd, kernel).keys,
            "attention.head_count_kv": [spec.n_kv if kind == ATTENDS else 0 for kind in kinds],
        },
    )


def _kernels(weight: F32) -> F32:
    """[channels, 1, kernel] -> [channels, kernel]"""
    return weight[:, 0]


_CONVOLUTION = (
    TensorRole("conv.in_proj.weight", "shortconv.in_proj.weight"),
    TensorRole("conv.conv.weight", "shortconv.conv.weight", "vector", transform=_kernels),
    TensorRole("conv.out_proj.weight", "shortconv.out_proj.weight"),
)


def layer_kinds(config: Mapping[str, Any], n_layer: int) -> list[str]:
    """Raises:
    ConvertError: kinds of other models, another number of them, or no layer that attends.
    """
    attending = config.get("full_attn_idxs")
    usual = [ATTENDS if attending is None or at in attending else RECURRENT for at in range(n_layer)]
    kinds = list(config.get("layer_types") or usual)
    for kind in kinds:
        require({"layer_types": kind}, "layer_types", None, RECURRENT, ATTENDS)
    if len(kinds) != n_layer:
        raise ConvertError("config.json", f"{n_layer} layer_types, one a layer", str(len(kinds)))
    if ATTENDS not in kinds:
        raise ConvertError("config.json", "a layer that attends, whose K and V are cached", "none")
    return kinds


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    counts = kv_heads(stock, stock.n_layer())
    attends = next(layer for layer, n in enumerate(counts) if n)
    return {
        **stock.of_layer(attends, False).sizes(),
        "norm_eps": stock.number("attention.layer_norm_rms_epsilon", 0, 1),
        "conv_L_cache": stock.whole("shortconv.l_cache", 2, 16),
        "layer_types": [ATTENDS if n else RECURRENT for n in counts],
    }
