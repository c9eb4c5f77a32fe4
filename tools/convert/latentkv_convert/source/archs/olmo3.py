"""olmo3: OLMo 3 (7B, 32B).

OLMo 2's block and file, with a sliding window in three of four layers, whose RoPE is not scaled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...ir import ModelSpec
from . import FULL, LOCAL, bases_by_kind, layer_types, local_layers, olmo2, ropes_by_kind, warn_of_readers


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    base = config.get("rope_theta", 5e5)
    full = {"rope_theta": base, **(config.get("rope_scaling") or {})}
    ropes = ropes_by_kind(config, full, {"rope_theta": base})
    spec = olmo2.model_spec({**config, "rope_scaling": None, "rope_parameters": ropes[FULL]})
    usual = [(layer + 1) % olmo2.PERIOD != 0 for layer in range(spec.n_layer)]
    is_local = local_layers(config, usual)
    if is_local != usual:
        warn_of_readers(f"a window in all but every fourth layer, for stock readers of {spec.gguf_arch}")
    window = int(config.get("sliding_window") or 4096)
    bases = bases_by_kind(ropes)
    keys: dict[str, Any] = {
        "attention.sliding_window": window,
        "attention.sliding_window_pattern": list(is_local),
    }
    if bases[LOCAL] != bases[FULL]:
        keys["rope.freq_base_swa"] = bases[LOCAL]
    return replace(
        spec,
        block=replace(
            spec.block,
            windows=tuple(window if local else 0 for local in is_local),
            rope_bases=tuple(bases[kind] for kind in layer_types(is_local)),
            rope_scaled=tuple(not local for local in is_local),
        ),
        keys={**spec.keys, **keys},
    )
