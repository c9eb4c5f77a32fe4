"""apertus: Apertus (8B, 70B).

Llama's block with a norm on every query and key head, and an FFN without a gate, whose activation, xIELU,
has numbers of its own in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ....errors import ConvertError
from ....ir import ModelSpec
from ...stock import Stock
from .. import QK_NORMS, llama, require

XIELU = ("alpha_n", "alpha_p", "beta", "eps")
_SOURCES = {
    "attn_norm.weight": "attention_layernorm.weight",
    "ffn_norm.weight": "feedforward_layernorm.weight",
}


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    require(config, "hidden_act", "xielu", "xielu")
    require(config, "attention_bias", False, False)
    usual = {"rope_theta": 12000000.0, "rms_norm_eps": 1e-5}
    spec = llama.model_spec({**usual, **config, "hidden_act": "silu", "mlp_bias": False})
    numbers = config.get("xielu")
    return replace(
        spec,
        gguf_arch="apertus",
        block=replace(spec.block, activation="xielu", ffn="plain", rope_pairing="neox"),
        layer_tensors=(
            *(
                replace(role, source=_SOURCES.get(role.target, role.source), rope_heads=0)
                for role in spec.layer_tensors
                if role.target != "ffn_gate.weight"
            ),
            *QK_NORMS,
        ),
        keys={**spec.keys, **({f"xielu.{name}": numbers[name] for name in XIELU} if numbers else {})},
        layer_numbers={} if numbers else {f"xielu.{name}": f"mlp.act_fn.{name}" for name in XIELU},
    )


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it, and the numbers of its xIELU."""
    config, numbers = llama.config_of(stock), {}
    for name in XIELU:
        given = stock.values.get(f"xielu.{name}")
        values = given if isinstance(given, list) else [given] * config["num_hidden_layers"]
        if len(values) != config["num_hidden_layers"] or not all(isinstance(x, float) for x in values):
            raise ConvertError(stock.where, f"xielu.{name}, one number a layer", str(given)[:40])
        numbers[name] = values
    return {**config, "hidden_act": "xielu", "xielu": numbers}
