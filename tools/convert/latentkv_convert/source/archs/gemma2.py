"""gemma2: Gemma 2 (2B, 9B, 27B).

Llama's block with RMS norms before and after each branch, scaled embeddings, soft caps of scores and
logits, and a sliding window in every second layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ... import limits
from ...ir import ModelSpec
from ..stock import Stock
from . import every_second, layer_types, require
from .with_pictures import gemma3_text

STOCK_KEYS = ("attn_logit_softcapping", "final_logit_softcapping")
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_WIDE_LAYERS = 46  # the 27B model's, whose scores are scaled by another width than head_dim


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    require(config, "attention_bias", False, False)
    spec = gemma3_text.as_llama(config)
    is_local = every_second(config, spec.n_layer, "gemma2")
    window = int(config.get("sliding_window") or 4096)
    caps = {
        field: limits.number("config.json", field, config.get(field, usual_cap) or 0.0, *limits.SOFTCAP)
        for field, usual_cap in _CAPS.items()
    }
    width = float(config.get("query_pre_attn_scalar", 256))
    norms = {target: source for target, source in gemma3_text.NORMS.items() if "attn_q" not in target}
    norms.pop("attn_k_norm.weight")
    return replace(
        spec,
        gguf_arch="gemma2",
        block=replace(
            spec.block,
            rope_pairing="neox",
            embedding_scale=math.sqrt(spec.n_embd),
            attention_scale=1 / math.sqrt(width),
            attention_softcap=caps["attn_logit_softcapping"],
            logit_softcap=caps["final_logit_softcapping"],
            windows=tuple(window if local else 0 for local in is_local),
        ),
        layer_tensors=(
            *(role for role in spec.layer_tensors if role.target not in norms),
            *(gemma3_text.norm(f"{source}.weight", target) for target, source in norms.items()),
        ),
        global_tensors=tuple(
            gemma3_text.norm(role.source, role.target) if role.kind == "vector" else role
            for role in spec.global_tensors
        ),
        keys={**spec.keys, "attention.sliding_window": window, **caps},
    )


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    sizes, window = stock.sizes(), stock.window()
    n_layer = sizes["num_hidden_layers"]
    return {
        **sizes,
        "rms_norm_eps": stock.number("attention.layer_norm_rms_epsilon", 0, 1),
        "query_pre_attn_scalar": gemma3_text.width_of_scores(sizes, _WIDE_LAYERS),
        "sliding_window": window,
        "layer_types": layer_types(bool(window) and layer % 2 == 0 for layer in range(n_layer)),
        **{field: stock.number(field, 0, limits.SOFTCAP[1], 0.0) for field in _CAPS},
    }
