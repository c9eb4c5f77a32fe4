"""qwen3_moe: Qwen 3 with experts (30B-A3B, 235B-A22B).

Qwen 3's attention; a router chooses some of a layer's experts for each token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ....errors import warn
from ....ir import ModelSpec, TensorRole
from ...stock import Stock
from .. import expert_keys, qwen3, require

ARCHITECTURE = "qwen3moe"
STOCK_KEYS = ("expert_count", "expert_used_count")


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    require(config, "decoder_sparse_step", 1, 1)
    require(config, "mlp_only_layers", None, None, [])
    is_normed = bool(config.get("norm_topk_prob", False))
    if not is_normed:
        expected = "norm_topk_prob true, for stock readers of the qwen3moe architecture"
        warn("config.json", expected, "false", "this runtime follows it; a reader that does not will differ")
    spec = qwen3.model_spec(config)
    n_expert = int(config.get("num_experts", 128))
    dense = [
        role for role in spec.layer_tensors if not role.target.startswith(("ffn_gate", "ffn_up", "ffn_down"))
    ]
    experts = [
        TensorRole(f"mlp.experts.{{}}.{name}_proj.weight", f"ffn_{name}_exps.weight", n_expert=n_expert)
        for name in ("gate", "up", "down")
    ]
    n_used, n_ff = int(config.get("num_experts_per_tok", 8)), int(config.get("moe_intermediate_size", 768))
    return replace(
        spec,
        gguf_arch=ARCHITECTURE,
        block=replace(spec.block, ffn="experts", expert_norm=is_normed),
        layer_tensors=(*dense, TensorRole("mlp.gate.weight", "ffn_gate_inp.weight", "vector"), *experts),
        keys={**spec.keys, **expert_keys(n_expert, n_used, n_ff)},
    )


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    config = qwen3.config_of(stock)
    n_used = stock.whole("expert_used_count", 1, 4096)
    n_ff = max(1, config["intermediate_size"] // n_used)
    return {
        **config,
        "num_experts": stock.whole("expert_count", 2, 4096),
        "num_experts_per_tok": n_used,
        "moe_intermediate_size": stock.whole("expert_feed_forward_length", 1, 1 << 22, n_ff),
        "norm_topk_prob": True,
    }
