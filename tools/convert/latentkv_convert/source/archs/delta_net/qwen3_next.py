"""qwen3_next: Qwen3-Next and Qwen3-Coder-Next (80B-A3B).

Projections of a delta net are packed by key heads, and value heads stay in the checkpoint's order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ....ir import ModelSpec, TensorRole
from ...recurrent import DeltaNetSizes
from ...stock import Stock
from .. import delta_net

ARCHITECTURE = "qwen3next"
STOCK_KEYS = ("expert_count", "expert_used_count")


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    spec = delta_net.model_spec(config, ARCHITECTURE, projections)
    return delta_net.with_experts(spec, config)


def projections(sizes: DeltaNetSizes) -> tuple[TensorRole, ...]:
    """A key head's rows of Q, K, V and the gate are beside each other in the checkpoint."""
    width, wide = sizes.width, sizes.shared * sizes.width
    rows = np.arange(sizes.n_k * 2 * (width + wide)).reshape(sizes.n_k, -1)
    q, k, v, gate = (part.reshape(-1) for part in np.split(rows, np.cumsum((width, width, wide)), axis=1))
    packed = "linear_attn.in_proj_qkvz.weight"
    return (
        TensorRole(packed, "attn_qkv.weight", rows=np.concatenate([q, k, v])),
        TensorRole(packed, "attn_gate.weight", rows=gate),
        TensorRole("linear_attn.in_proj_ba.weight", "ssm_ba.weight"),
    )


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    return {**delta_net.config_of(stock), **delta_net.expert_config_of(stock)}
