"""glm4_moe_lite: GLM-4.7-Flash (30B-A3B).

DeepSeek V3's block; every layer but the first has experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....ir import ModelSpec
from .. import mla

_USUAL = {"scoring_func": "sigmoid", "norm_topk_prob": True, "first_k_dense_replace": 1}
_USUAL |= {"routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5}


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    return mla.model_spec(_USUAL | dict(config))
