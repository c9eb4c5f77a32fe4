"""deepseek_v2: DeepSeek V2 and V2.5, Lite ones among them, Coder V2.

Scores of experts are a softmax, and their weights are not divided by their sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....ir import ModelSpec
from .. import mla, require


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    require(config, "scoring_func", "softmax", "softmax")
    require(config, "topk_method", "greedy", "greedy", "group_limited_greedy")
    usual = {"topk_method": "greedy", "scoring_func": "softmax"}
    return mla.model_spec(
        usual | dict(config) | {"norm_topk_prob": False}
    )  # which transformers does not read
