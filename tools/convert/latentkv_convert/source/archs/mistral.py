"""mistral: Mistral 7B, NeMo, Small.

Llama's block and file, with a sliding window where the checkpoint has one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...errors import warn
from ...ir import ModelSpec
from . import llama, window_keys


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    spec = llama.model_spec({**config, "attention_bias": False, "mlp_bias": False})
    window = config.get("sliding_window", 4096)
    if window and int(window) < spec.n_ctx:
        warn(
            "config.json",
            "no sliding window, for stock readers of the llama architecture",
            f"a window of {window} tokens",
            "this runtime follows it; a reader that does not will differ past it",
        )
    return replace(spec, keys={**spec.keys, **window_keys(window)})
