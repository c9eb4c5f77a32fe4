"""minimax_m2: MiniMax M2 and M2.1 (230B-A10B).

Norms over all heads of Q and K, RoPE on half a head, and experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ....ir import ModelSpec
from ...stock import Stock
from .. import QK_NORMS, llama, routed

ARCHITECTURE = "minimax-m2"
STOCK_KEYS = routed.STOCK_KEYS
_FIELDS = {"n_expert": "num_local_experts", "n_used": "num_experts_per_tok", "width": "intermediate_size"}
_BLOCK = "block_sparse_moe"
_NAMES = routed.Names(
    router=f"{_BLOCK}.gate.weight",
    bias=f"{_BLOCK}.e_score_correction_bias",
    each=f"{_BLOCK}.experts.{{}}.*.weight",
    maps={"gate": "w1", "up": "w3", "down": "w2"},
)


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    config = {"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_theta": 5e6, **config}
    plain = {"rope_scaling": None, "rope_parameters": None, "attention_bias": False, "mlp_bias": False}
    spec = llama.model_spec({**config, **plain})
    spec = replace(
        llama.partly_rotated(spec, config, 1.0, int(config.get("rotary_dim") or 0)),
        gguf_arch="minimax-m2",
        block=replace(spec.block, rope_pairing="neox"),
        layer_tensors=(*spec.layer_tensors, *QK_NORMS),
        whole_norms=True,
    )
    return routed.with_experts(spec, routed.of_config(config, _FIELDS), _NAMES)


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    routed.require_sigmoid(stock)
    return llama.config_of(stock) | routed.of_stock(stock, _FIELDS)
