"""mistral3: Ministral 3, Devstral Small 2, Mistral Small 3.1 and 3.2, text.

Llama's block and row order. Newer ones scale RoPE by YaRN, and queries by a factor that grows with the
position. A checkpoint that sees pictures is read as its text part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .... import limits
from ....errors import ConvertError
from ....ir import ModelSpec
from ...stock import Stock
from .. import llama, mistral

OTHER_TYPES = ("ministral3",)
STOCK_KEYS = ("attention.temperature_scale",)
TEXT_PREFIX = "model.language_model"
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_LARGEST = 1e3


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    is_older = (config.get("text_config") or {}).get("model_type") == "mistral"
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or ({} if is_older else _YARN))
    rope.pop("max_position_embeddings", None)  # the config's own once more
    growth = limits.number(
        "rope", "llama_4_scaling_beta", rope.pop("llama_4_scaling_beta", None) or 0, 0, _LARGEST
    )
    usual = {
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096 if is_older else None,
    }
    spec = mistral.model_spec({**usual, **config, "rope_scaling": None, "rope_parameters": rope})
    keys = dict(spec.keys)
    if growth:
        if "rope.scaling.original_context_length" not in keys:
            raise ConvertError(
                "rope", "rope_type yarn beside llama_4_scaling_beta", str(rope.get("rope_type"))
            )
        keys["attention.temperature_scale"] = growth
    if rope.get("mscale") == 1 and rope.get("mscale_all_dim") and "attention_factor" not in rope:
        keys.pop("rope.scaling.attn_factor", None)  # as stock readers have it
        keys["rope.scaling.yarn_log_multiplier"] = float(rope["mscale_all_dim"])
    return replace(spec, gguf_arch="mistral3", keys=keys)


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    if stock.values.get("attention.temperature_scale"):
        stock.number("attention.temperature_scale", 0, _LARGEST)
        stock.whole("rope.scaling.original_context_length", 1, 1 << 30)
    return {**llama.config_of(stock), "sliding_window": None, "rope_parameters": {"rope_type": "default"}}
