"""granite: Granite 3.x (dense).

Llama's block and row order with scaled embeddings, scores, branches and logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ... import limits
from ...errors import ConvertError
from ...ir import ModelSpec
from ..stock import Stock
from . import llama

# Field of config.json -> stock key. The file's logit_scale is what logits are divided by, too.
_SCALES = {
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
STOCK_KEYS = tuple(_SCALES.values())


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    spec = llama.model_spec({"rms_norm_eps": 1e-6, **config})
    scales = {
        field: limits.number("config.json", field, config.get(field, 1.0), *limits.SCALE) for field in _SCALES
    }
    return replace(
        spec,
        gguf_arch="granite",
        block=replace(
            spec.block,
            embedding_scale=scales["embedding_multiplier"],
            attention_scale=scales["attention_multiplier"],
            residual_scale=scales["residual_multiplier"],
            logit_scale=1 / scales["logits_scaling"],
        ),
        keys={**spec.keys, **{_SCALES[field]: scale for field, scale in scales.items()}},
    )


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    if stock.values.get("rope.scaling.finetuned", True) is not True:
        raise ConvertError(stock.where, "rope.scaling.finetuned true", "false, which means no RoPE here")
    return scales_of(stock, llama.config_of(stock))


def scales_of(stock: Stock, config: dict[str, Any]) -> dict[str, Any]:
    """config with the factors that the file names."""
    plain = {"attention_multiplier": config["head_dim"] ** -0.5}
    for field, key in _SCALES.items():
        config[field] = stock.number(key, 0, limits.SCALE[1], 0.0) or plain.get(field, 1.0)  # 0 means none
    return config
