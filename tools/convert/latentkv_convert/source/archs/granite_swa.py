"""granite_swa: Granite with sliding windows.

Granite's scales and a sink logit for every head. Three of four layers have a sliding window, and some layers
may be without RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ... import limits
from ...errors import ConvertError
from ...ir import ModelSpec, TensorRole
from .. import rope
from ..stock import Stock
from . import granite, layer_types, local_layers, warn_of_readers

STOCK_KEYS = granite.STOCK_KEYS
_PERIOD = 4  # of so many layers the first has no window
_PATTERN = "attention.rope_pattern"


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    n_layer = int(config["num_hidden_layers"])
    is_local = local_layers(config, [layer % _PERIOD != 0 for layer in range(n_layer)])
    window = limits.number("config.json", "sliding_window", config.get("sliding_window", 128), 1, 1 << 30)
    given = rope.parameters(config)
    bases = list(config.get("layer_rope_theta") or [given["rope_theta"]] * n_layer)
    if len(bases) != n_layer:
        raise ConvertError("config.json", f"{n_layer} values of layer_rope_theta", str(len(bases)))
    turning = [limits.number("rope", "rope_theta", base, *limits.ROPE_BASE) for base in bases if base]
    if len(set(turning)) > 1:
        warn_of_readers("one layer_rope_theta but for 0, for stock readers of granite_swa")
    one = {"rope_parameters": given | {"rope_theta": turning[0] if turning else given["rope_theta"]}}
    spec = granite.model_spec({"rms_norm_eps": 1e-5, "tie_word_embeddings": True, **config, **one})
    return replace(
        spec,
        gguf_arch="granite_swa",
        block=replace(
            spec.block,
            windows=tuple(int(window) if local else 0 for local in is_local),
            rope_bases=tuple(float(base) for base in bases),
        ),
        layer_tensors=(
            *spec.layer_tensors,
            TensorRole("self_attn.sinks", "attn_sinks.weight", "vector"),
        ),
        keys={
            **spec.keys,
            "attention.sliding_window": int(window),
            "attention.sliding_window_pattern": list(is_local),
            **({} if all(bases) else {_PATTERN: [bool(base) for base in bases]}),
        },
    )


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    config = granite.config_of(stock)
    n_layer, window = config["num_hidden_layers"], stock.window()
    if window is None:
        raise ConvertError(stock.where, "the key attention.sliding_window", "none")
    turns = stock.values.get(_PATTERN, [True] * n_layer)
    if not isinstance(turns, list) or len(turns) != n_layer:
        got = str(len(turns)) if isinstance(turns, list) else str(turns)[:40]
        raise ConvertError(stock.where, f"{n_layer} values of {_PATTERN}, one a layer", got)
    return {
        **config,
        "sliding_window": window,
        "layer_types": layer_types(stock.local_layers(n_layer, _PERIOD, first_is_full=True)),
        "layer_rope_theta": [config["rope_theta"] if turned else 0 for turned in turns],
    }
