"""hunyuan_v1_dense: Hunyuan 0.5B to 7B, Hunyuan-MT.

Llama's block with norms on query and key heads after RoPE, whose base may be stretched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .... import limits
from ....ir import ModelSpec, TensorRole
from ...stock import Stock
from .. import llama

ARCHITECTURE = "hunyuan-dense"
_NORMS = {"attn_q_norm.weight": "query_layernorm", "attn_k_norm.weight": "key_layernorm"}


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    config = _stretched({"rms_norm_eps": 1e-5, **config, "mlp_bias": False})
    spec = llama.model_spec(config)
    return replace(
        spec,
        gguf_arch=ARCHITECTURE,
        block=replace(spec.block, rope_pairing="neox", norm_after_rope=True),
        layer_tensors=(
            *(replace(role, rope_heads=0) for role in spec.layer_tensors),
            *(TensorRole(f"self_attn.{name}.weight", target, "vector") for target, name in _NORMS.items()),
        ),
    )


def _stretched(config: Mapping[str, Any]) -> dict[str, Any]:
    """A dynamic scaling that gives an alpha depends on no length: base · alpha^(d / (d - 2))."""
    given = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    alpha = given.get("alpha")
    if not alpha or given.get("rope_type", given.get("type")) not in ("dynamic", "xdrope"):
        return dict(config)
    dim = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    alpha = limits.number("rope", "alpha", alpha, 1e-3, 1e9)
    base = float(given.get("rope_theta", config.get("rope_theta", 10000.0))) * alpha ** (dim / (dim - 2))
    return {**config, "rope_theta": base, "rope_scaling": None, "rope_parameters": None}


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    return llama.config_of(stock)
