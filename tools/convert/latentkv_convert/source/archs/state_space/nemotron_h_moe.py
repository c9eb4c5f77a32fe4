"""nemotron_h_moe: Nemotron 3 Nano and Super.

As nemotron_h, with experts in its FFNs, and one that every token has."""

from __future__ import annotations

from typing import Any

from . import nemotron_h

STOCK_KEYS = (
    "expert_count",
    "expert_used_count",
    "expert_shared_count",
    "expert_group_count",
    "expert_gating_func",
    "expert_weights_norm",
    "expert_weights_scale",
)
TINY: dict[str, Any] = {
    **nemotron_h.TINY,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention"],
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 64,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
model_spec = nemotron_h.model_spec
config_of = nemotron_h.config_of
