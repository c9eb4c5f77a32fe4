"""bailing_moe_v2: Ling and Ring 2.0 (16B-A1B, 100B-A6B, 1T-A50B), Sarvam 30B.

Packed Q, K and V with norms on query and key heads, RoPE on half a head, and experts in groups in all but the
first layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ....errors import ConvertError
from ....ir import ModelSpec, Projection, TensorRole
from ...stock import Stock
from .. import llama, packed_rows, require, routed

OTHER_TYPES = ("bailing_moe", "sarvam_moe")
ARCHITECTURE = "bailingmoe2"
STOCK_KEYS = (*routed.STOCK_KEYS, "expert_group_count")
_FIELDS = {**routed.SEVERAL, "n_expert": "num_experts"}
_NAMES = routed.Names(bias="mlp.gate.expert_bias")
_SOURCES = {
    "attn_output.weight": "attention.dense.weight",
    "token_embd.weight": "model.word_embeddings.weight",
}
_NORMS = {"attn_q_norm.weight": "query_layernorm", "attn_k_norm.weight": "key_layernorm"}


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    usual_share = 1.0 if config["model_type"] == "sarvam_moe" else 0.5
    config = {"rms_norm_eps": 1e-6, "first_k_dense_replace": 1, **config}
    if "BailingMoeForCausalLM" in (config.get("architectures") or ()):
        raise ConvertError("config.json", "BailingMoeV2ForCausalLM", "BailingMoeForCausalLM, the first Ling")
    for name in ("use_qkv_bias", "use_bias", "norm_head", "attention_bias"):
        require(config, name, False, False)
    require(config, "use_qk_norm", True, True)
    require(config, "score_function", "sigmoid", "sigmoid", None)
    whole = {"rope_scaling": None, "rope_parameters": None, "attention_bias": False, "mlp_bias": False}
    spec = llama.model_spec({**config, **whole})
    spec = llama.partly_rotated(spec, config, usual_share)
    rows = packed_rows(spec.n_head, spec.n_kv, spec.head_dim, interleaved=False)
    spec = replace(
        spec,
        gguf_arch=ARCHITECTURE,
        packed_qkv=True,
        block=replace(spec.block, rope_pairing="neox"),
        projections={side: Projection("attention.query_key_value", rows[side]) for side in "qkv"},
        global_tensors=_renamed(spec.global_tensors),
        layer_tensors=(
            *(role for role in _renamed(spec.layer_tensors) if role.target != "attn_q.weight"),
            *(TensorRole(f"attention.{name}.weight", target, "vector") for target, name in _NORMS.items()),
        ),
    )
    experts = routed.of_config(config, _FIELDS)
    n_shared = int(config.get("num_shared_experts") or 0)
    width = int(config.get("moe_shared_expert_intermediate_size") or experts.width) * n_shared
    spec = routed.with_experts(spec, replace(experts, shared=width), _NAMES)
    groups = routed.groups(config, experts)
    return replace(spec, keys={**spec.keys, "expert_shared_count": n_shared, **groups})


def _renamed(roles: tuple[TensorRole, ...]) -> tuple[TensorRole, ...]:
    return tuple(replace(role, source=_SOURCES.get(role.target, role.source)) for role in roles)


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    routed.require_sigmoid(stock)
    found = routed.of_stock(stock, {**_FIELDS, "shared": "moe_shared_expert_intermediate_size"})
    return {
        **llama.config_of(stock),
        **found,
        **routed.groups_of_stock(stock),
        "num_shared_experts": 1 if found["moe_shared_expert_intermediate_size"] else 0,
    }
