"""gemma3_text: Gemma 3, text (270M to 27B).

Llama's block with RMS norms before and after each branch and on queries and keys, scaled embeddings, and
in five of six layers a sliding window and a RoPE base of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .... import limits
from ....ir import ModelSpec, TensorRole
from ...stock import Stock
from .. import (
    FULL,
    LOCAL,
    bases_by_kind,
    from_zero,
    layer_types,
    llama,
    local_layers,
    require,
    ropes_by_kind,
    warn_of_readers,
)

OTHER_TYPES = ("gemma3",)
ARCHITECTURE = "gemma3"
TEXT_PREFIX = "model.language_model"
STOCK_KEYS = ("final_logit_softcapping",)
_PERIOD = 6  # of every so many layers the last sees all tokens
_WIDE_LAYERS = 62  # the 27B model's, whose scores are scaled by another width than head_dim
# Sizes that published models with pictures leave out.
_OF_PICTURES = {"num_attention_heads": 8, "vocab_size": 262208, "max_position_embeddings": 131072}
NORMS = {  # what each of a layer's norms is called
    "attn_norm.weight": "input_layernorm",
    "post_attention_norm.weight": "post_attention_layernorm",
    "ffn_norm.weight": "pre_feedforward_layernorm",
    "post_ffw_norm.weight": "post_feedforward_layernorm",
    "attn_q_norm.weight": "self_attn.q_norm",
    "attn_k_norm.weight": "self_attn.k_norm",
}


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    require(config, "attention_bias", False, False)
    require(config, "attn_logit_softcapping", None, None)
    ropes = _ropes(config)
    config = _OF_PICTURES | dict(config) if "text_config" in config else config
    spec = as_llama(config, ropes[FULL])
    is_local = _local_layers(config, spec.n_layer)
    window = int(config.get("sliding_window") or 4096)
    base = bases_by_kind(ropes)
    softcap = float(config.get("final_logit_softcapping") or 0.0)
    keys: dict[str, Any] = {"final_logit_softcapping": softcap} if softcap else {}
    if any(is_local):
        keys |= {"attention.sliding_window": window, "rope.freq_base_swa": base[LOCAL]}
        keys |= _period_keys(is_local)
    return replace(
        spec,
        gguf_arch=ARCHITECTURE,
        block=replace(
            spec.block,
            rope_pairing="neox",
            embedding_scale=math.sqrt(spec.n_embd),
            attention_scale=1 / math.sqrt(float(config.get("query_pre_attn_scalar", 256))),
            logit_softcap=softcap,
            windows=tuple(window if local else 0 for local in is_local),
            rope_bases=tuple(base[kind] for kind in layer_types(is_local)),
            rope_scaled=tuple(not local for local in is_local),
        ),
        layer_tensors=(
            *(role for role in spec.layer_tensors if role.target not in NORMS),
            *(norm(f"{source}.weight", target) for target, source in NORMS.items()),
        ),
        global_tensors=tuple(
            norm(role.source, role.target) if role.kind == "vector" else role for role in spec.global_tensors
        ),
        keys={**spec.keys, **keys},
    )


def as_llama(config: Mapping[str, Any], rope: Mapping[str, Any] | None = None) -> ModelSpec:
    """What Gemmas have in common with Llama. rope: in place of the config's."""
    usual = {"head_dim": 256, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
    activation = config.get("hidden_activation", "gelu_pytorch_tanh")
    turned = {} if rope is None else {"rope_scaling": None, "rope_parameters": rope}
    return llama.model_spec(usual | dict(config) | {"mlp_bias": False, "hidden_act": activation, **turned})


def norm(source: str, target: str) -> TensorRole:
    return TensorRole(source, target, "vector", transform=from_zero)


def _ropes(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """RoPE by kind of layer: rope_parameters of transformers 5, or the fields of earlier configs."""
    full = {"rope_theta": config.get("rope_theta", 1e6), **(config.get("rope_scaling") or {})}
    return ropes_by_kind(config, full, {"rope_theta": config.get("rope_local_base_freq", 1e4)})


def _local_layers(config: Mapping[str, Any], n_layer: int) -> list[bool]:
    """Which layers have a window."""
    period = int(config.get("sliding_window_pattern", _PERIOD))
    return local_layers(config, [(layer + 1) % period != 0 for layer in range(n_layer)])


def _period_keys(is_local: Sequence[bool]) -> dict[str, Any]:
    """For stock readers, which know layers by their period."""
    for period in (_PERIOD, *range(2, len(is_local) + 2)):
        if all(local == ((layer + 1) % period != 0) for layer, local in enumerate(is_local)):
            return {} if period == _PERIOD else {"attention.sliding_window_pattern": period}
    equal = "layers without a window at equal distances"
    warn_of_readers(f"{equal}, for stock readers of the {ARCHITECTURE} architecture")
    return {}


def width_of_scores(sizes: Mapping[str, int], wide_layers: int) -> int:
    """By whose root a file's scores are divided. wide_layers: of the model where it is no head's."""
    is_wide = sizes["num_hidden_layers"] == wide_layers
    return sizes["hidden_size"] // sizes["num_attention_heads"] if is_wide else sizes["head_dim"]


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    sizes, window = stock.sizes(), stock.window()
    n_layer = sizes["num_hidden_layers"]
    is_local = stock.local_layers(n_layer, _PERIOD)
    return {
        **sizes,
        "rms_norm_eps": stock.number("attention.layer_norm_rms_epsilon", 0, 1),
        "rope_local_base_freq": stock.number("rope.freq_base_swa", *limits.ROPE_BASE, default=1e4),
        "query_pre_attn_scalar": width_of_scores(sizes, _WIDE_LAYERS),
        "sliding_window": window,
        "layer_types": layer_types(bool(window) and local for local in is_local),
        "final_logit_softcapping": stock.number("final_logit_softcapping", 0, 1e6, 0.0),
    }
