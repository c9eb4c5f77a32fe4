"""nemotron_h_moe: Nemotron 3 Nano and Super.

As nemotron_h, with experts in its FFNs, and one that every token has."""

from __future__ import annotations

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
model_spec = nemotron_h.model_spec
config_of = nemotron_h.config_of
