"""lfm2_moe: LFM2 with experts.

As lfm2, with experts in all but the first layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ....ir import ModelSpec, TensorRole
from ...stock import Stock
from .. import routed, short_conv, warn_of_readers

ARCHITECTURE = "lfm2moe"
STOCK_KEYS = routed.STOCK_KEYS
_FIELDS = {**routed.SEVERAL, "n_expert": "num_experts", "n_dense": "num_dense_layers"}
_NAMES = routed.Names(
    router="feed_forward.gate.weight",
    bias="feed_forward.expert_bias",
    each="feed_forward.experts.{}.*.weight",
    maps=short_conv.MAPS,
)


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    config = {"num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4, **config}
    experts = routed.of_config(config, _FIELDS)
    has_bias = bool(config.get("use_expert_bias", True))
    if not (experts.is_normed and experts.scale == 1.0 and has_bias):
        warn_of_readers(
            "norm_topk_prob, a routed_scaling_factor of 1 and use_expert_bias, for stock readers of lfm2moe"
        )
    plain = short_conv.model_spec(config, ARCHITECTURE)
    spec = routed.with_experts(plain, experts, _NAMES if has_bias else replace(_NAMES, bias=""))

    def fed(roles: tuple[TensorRole, ...]) -> tuple[TensorRole, ...]:
        """With the FFN that layers with experts have."""
        ffn = (role for role in spec.layer_tensors if role.target.startswith(("ffn_", "exp_")))
        return (*(role for role in roles if not role.target.startswith("ffn_")), *ffn)

    return replace(
        spec,
        recurrent_tensors=fed(plain.recurrent_tensors),
        dense_recurrent_tensors=plain.recurrent_tensors if experts.n_dense else (),
    )


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    routed.require_sigmoid(stock)
    found = routed.of_stock(stock, _FIELDS)
    # stock readers divide by the sum, whatever the file says
    is_normed = bool(stock.values.get("expert_weights_norm", True))
    return {
        **short_conv.config_of(stock),
        **found,
        "norm_topk_prob": is_normed,
        "use_expert_bias": any(stock.has_in("exp_probs_b.bias", at) for at in range(stock.n_layer())),
    }
