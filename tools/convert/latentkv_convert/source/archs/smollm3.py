"""smollm3: SmolLM3.

Llama's block and row order, without RoPE in every fourth layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...errors import ConvertError
from ...ir import ModelSpec
from ..stock import Stock
from . import llama, require, warn_of_readers

_PERIOD = 4  # of so many layers the last has no RoPE


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    require(config, "use_sliding_window", False, False, None)
    stock = {"rope_theta": 2e6, "rms_norm_eps": 1e-6, "num_key_value_heads": 4, "tie_word_embeddings": True}
    spec = llama.model_spec(stock | dict(config))
    period = int(config.get("no_rope_layer_interval", _PERIOD))
    usual = [int((layer + 1) % period != 0) for layer in range(spec.n_layer)]
    turned = list(config.get("no_rope_layers") or usual)  # despite its name, 1 where a layer has RoPE
    if len(turned) < spec.n_layer:
        raise ConvertError("config.json", f"{spec.n_layer} values of no_rope_layers", str(len(turned)))
    if [bool(turn) for turn in turned[: spec.n_layer]] != [
        (i + 1) % _PERIOD != 0 for i in range(spec.n_layer)
    ]:
        expected = f"no RoPE in every layer {_PERIOD}, for stock readers of the smollm3 architecture"
        warn_of_readers(expected, "other layers without")
    base = float(spec.keys["rope.freq_base"])
    bases = tuple(base if turn else 0.0 for turn in turned[: spec.n_layer])
    return replace(spec, gguf_arch="smollm3", block=replace(spec.block, rope_bases=bases))


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    return llama.config_of(stock)
