"""ernie4_5: ERNIE 4.5 (0.3B).

Llama's block; RoPE turns neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ...errors import ConvertError
from ...ir import ModelSpec, Projection
from ..frequencies import paired_rows
from ..stock import Stock
from . import llama

ARCHITECTURE = "ernie4_5"


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    if config.get("use_bias"):
        raise ConvertError("config.json", "use_bias false, for readers of the ernie4_5 architecture", "true")
    usual = {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True}
    return neighbours(replace(llama.model_spec(usual | dict(config)), gguf_arch="ernie4_5"))


def neighbours(spec: ModelSpec) -> ModelSpec:
    """For checkpoints whose planes are neighbours, as those of files are; rows are read in halves."""
    rows = {
        side: np.argsort(paired_rows(heads, spec.head_dim, spec.n_rot))
        for side, heads in (("q", spec.n_head), ("k", spec.n_kv))
    }
    return replace(
        spec,
        projections={side: Projection(f"self_attn.{side}_proj", rows.get(side)) for side in "qkv"},
        layer_tensors=tuple(
            replace(role, rows=rows["q"]) if role.target == "attn_q.weight" else role
            for role in spec.layer_tensors
        ),
    )


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    return {**llama.config_of(stock), "use_bias": False}
