"""deepseek_v3: DeepSeek V3 and R1, Moonlight, and GGUFs of all models with multi-head latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....ir import ModelSpec
from ...stock import Stock
from .. import mla

ARCHITECTURE = mla.ARCHITECTURE
STOCK_KEYS = mla.STOCK_KEYS
_USUAL = {"scoring_func": "sigmoid", "norm_topk_prob": True, "n_group": 8, "topk_group": 4}
_USUAL |= {"routed_scaling_factor": 2.5, "first_k_dense_replace": 3}


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    return mla.model_spec(_USUAL | dict(config))


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    return mla.config_of(stock)
