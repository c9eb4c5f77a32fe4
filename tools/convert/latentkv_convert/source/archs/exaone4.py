"""exaone4: EXAONE 4.0 (1.2B, 32B).

Norms after both branches and on every query and key head. In the larger model three of four layers have a
sliding window, and the others no RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ... import limits
from ...errors import ConvertError
from ...ir import ModelSpec, TensorRole
from ..stock import Stock
from . import LOCAL, layer_types, llama, local_layers, olmo2, warn_of_readers

_PERIOD = 4  # of so many layers the last has no window
_LARGE = 64  # layers of the model whose files mean a window


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    n_layer = int(config["num_hidden_layers"])
    window = int(config.get("sliding_window", 4096) or 0)
    period = config.get("sliding_window_pattern", _PERIOD) or 0
    is_local = local_layers(config, pattern_of(period, n_layer) if window else [False] * n_layer)
    if not window and any(is_local):
        raise ConvertError("config.json", f"a sliding_window beside layers of {LOCAL}", "none")
    spec = llama.model_spec({"rms_norm_eps": 1e-5, **config, "attention_bias": False, "mlp_bias": False})
    norms = {target: source for target, source in olmo2.NORMS.items()}
    if window and n_layer != _LARGE:
        warn_of_readers(f"a sliding window in a model of {_LARGE} layers alone, for stock readers of exaone4")
    keys: dict[str, Any] = {}
    if window:
        window = int(limits.number("config.json", "sliding_window", window, *limits.WINDOW))
        keys = {"attention.sliding_window": window, "attention.sliding_window_pattern": list(is_local)}
    base = float(spec.keys["rope.freq_base"])
    return replace(
        spec,
        gguf_arch="exaone4",
        block=replace(
            spec.block,
            rope_pairing="neox",
            windows=tuple(window if local else 0 for local in is_local) if window else None,
            rope_bases=tuple(base if local else 0.0 for local in is_local) if window else None,
        ),
        layer_tensors=(
            *(role for role in spec.layer_tensors if role.target not in olmo2.BEFORE),
            *(TensorRole(f"{source}.weight", target, "vector") for target, source in norms.items()),
        ),
        keys={**spec.keys, **keys},
    )


def pattern_of(period: Any, n_layer: int) -> list[bool]:
    """Which layers have a window: all but the last of every so many, or as letters say, L for those that do;
    then never the last layer."""
    if isinstance(period, str) and period and set(period) <= {"L", "G"}:
        return [period[i % len(period)] == "L" and i < n_layer - 1 for i in range(n_layer)]
    if not isinstance(period, int) or period < 1:
        raise ConvertError(
            "config.json", "sliding_window_pattern as a number or as letters L and G", str(period)[:40]
        )
    return [(i + 1) % period != 0 for i in range(n_layer)]


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    config = llama.config_of(stock)
    n_layer = config["num_hidden_layers"]
    window = stock.window()
    is_local = [bool(window) and local for local in stock.local_layers(n_layer, _PERIOD)]
    return {**config, "sliding_window": window, "layer_types": layer_types(is_local)}
