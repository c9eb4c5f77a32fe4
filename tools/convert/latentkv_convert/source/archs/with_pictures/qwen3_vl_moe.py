"""qwen3_vl_moe: Qwen3-VL with experts (30B-A3B, 235B-A22B), text.

The block of Qwen 3 with experts: tokens of text have the same number in all three of their positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ....ir import F32, ModelSpec, TensorRole
from ...stock import Stock
from ..routed import qwen3_moe
from . import qwen2_vl

ARCHITECTURE = "qwen3vlmoe"
STOCK_KEYS = qwen3_moe.STOCK_KEYS
TEXT_PREFIX = qwen2_vl.TEXT_PREFIX


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    own = {"norm_topk_prob": True, **qwen2_vl.of_text(config)}
    spec = qwen2_vl.with_sections(config, qwen3_moe.model_spec(own), "qwen3vlmoe")
    return replace(spec, layer_tensors=tuple(map(_stacked, spec.layer_tensors)))


def _stacked(role: TensorRole) -> TensorRole:
    """Published checkpoints hold experts in one tensor, inputs before outputs, gate beside up."""
    if not role.n_expert:
        return role
    name = role.target.removeprefix("ffn_").removesuffix("_exps.weight")
    source = "mlp.experts.down_proj" if name == "down" else "mlp.experts.gate_up_proj"

    def own(array: F32) -> F32:
        outputs = array.swapaxes(-1, -2)
        half = outputs.shape[-2] // 2
        return {"gate": outputs[..., :half, :], "up": outputs[..., half:, :]}.get(name, outputs)

    stacked = TensorRole(source, role.target, transform=own)
    return replace(role, otherwise=stacked)


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    return qwen3_moe.config_of(stock) | qwen2_vl.sections_of(stock)
