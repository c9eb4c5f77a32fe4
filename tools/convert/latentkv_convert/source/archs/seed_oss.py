"""seed_oss: Seed-OSS (36B).

Llama's block with biases on Q, K and V."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...ir import ModelSpec
from ..stock import Stock
from . import llama

ARCHITECTURE = "seed_oss"


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    usual = {"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "attention_bias": True}
    spec = llama.model_spec(usual | dict(config))
    left = set() if config.get("attention_out_bias") else {"attn_output.bias"}
    return replace(
        spec,
        gguf_arch="seed_oss",
        block=replace(spec.block, rope_pairing="neox"),
        layer_tensors=with_post_norm(spec, left),
    )


def with_post_norm(spec: ModelSpec, without: set[str]) -> tuple[Any, ...]:
    """Roles of layers, but for some, where files name the FFN's norm as one after attention."""
    names = {"ffn_norm.weight": "post_attention_norm.weight"}
    return tuple(
        replace(role, target=names.get(role.target, role.target), rope_heads=0)
        for role in spec.layer_tensors
        if role.target not in without
    )


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    return {**llama.config_of(stock), "attention_out_bias": stock.has("attn_output.bias")}
