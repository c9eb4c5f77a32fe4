"""qwen3_5: Qwen 3.5, 3.6 and 3.8, dense (0.8B to 27B)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ....ir import ModelSpec, TensorRole
from ...recurrent import DeltaNetSizes
from ...stock import Stock
from .. import delta_net

ARCHITECTURE = "qwen35"
TEXT_PREFIX = "model.language_model"  # of tensors in a checkpoint that sees pictures


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    spec = delta_net.model_spec(config, ARCHITECTURE, projections)
    return replace(spec, keys={**spec.keys, **delta_net.section_keys(config)})


def projections(sizes: DeltaNetSizes) -> tuple[TensorRole, ...]:
    wide, one = sizes.tiled(sizes.width), sizes.tiled(1)
    return (
        TensorRole("linear_attn.in_proj_qkv.weight", "attn_qkv.weight", rows=sizes.behind_keys(wide)),
        TensorRole("linear_attn.in_proj_z.weight", "attn_gate.weight", rows=wide),
        TensorRole("linear_attn.in_proj_b.weight", "ssm_beta.weight", rows=one),
        TensorRole("linear_attn.in_proj_a.weight", "ssm_alpha.weight", rows=one),
    )


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    return delta_net.config_of(stock)
