"""muse_glimmer: Muse Glimmer, text (30B).

Normed embeddings, norms without weights on query and key heads, and a gate of each number of attention's
output. Three of four layers have a sliding window, and the others no RoPE. Norms before and after both
branches; logits are scaled and capped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from .... import limits
from ....errors import ConvertError
from ....ir import F32, ModelSpec, TensorRole
from ... import rope
from ...stock import Stock
from .. import layer_types, llama, local_layers, require, warn_of_readers
from ..delta_net import norm

ARCHITECTURE = "muse-glimmer"
STOCK_KEYS = ("logit_scale", "final_logit_softcapping")
TEXT_PREFIX = "model.language_model"
_PERIOD = 4  # of so many layers, counted from the last, one has no window and no RoPE
_POST_EPS = 1e-8  # what readers assume
_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    require(config, "attention_bias", False, False)
    require(config, "hidden_activation", "silu", "silu")
    n_layer = int(config["num_hidden_layers"])
    usual = [(n_layer - 1 - layer) % _PERIOD != 0 for layer in range(n_layer)]
    is_local = local_layers(config, usual)
    given = rope.parameters(config)
    bases = list(config.get("layer_rope_theta") or [given["rope_theta"] * local for local in usual])
    if len(bases) != n_layer or set(bases) - {0, given["rope_theta"]}:
        wanted = f"{n_layer} values of layer_rope_theta, 0 or the rope_theta {given['rope_theta']}"
        raise ConvertError("config.json", wanted, str(bases)[:60])
    window = int(
        limits.number("config.json", "sliding_window", config.get("sliding_window", 2048), *limits.WINDOW)
    )
    eps = limits.number("config.json", "post_norm_eps", config.get("post_norm_eps", _POST_EPS), 0, 1)
    if eps != _POST_EPS or is_local != [base > 0 for base in bases]:
        warn_of_readers(f"post_norm_eps {_POST_EPS} and RoPE in layers with a window alone, for muse-glimmer")
    numbers = {
        name: limits.number("config.json", name, config.get(name, default), *bounds)
        for name, default, bounds in (
            ("qk_scale_factor", 3.87, limits.SCALE),
            ("output_multiplier", 1.0, limits.SCALE),
            ("final_logit_softcapping", 20.0, limits.SOFTCAP),
        )
    }
    plain = {"hidden_act": "silu", "mlp_bias": False}
    spec = llama.model_spec({"head_dim": 128, "rms_norm_eps": 1e-5, **config, **plain})
    norms = {f"{target}.weight" for target in _NORMS}
    softcap = numbers["final_logit_softcapping"]
    return replace(
        spec,
        gguf_arch=ARCHITECTURE,
        block=replace(
            spec.block,
            embedding_norm=True,
            post_norm_epsilon=eps,
            gate="sigmoid",
            logit_scale=numbers["output_multiplier"],
            logit_softcap=softcap,
            windows=tuple(window if local else 0 for local in is_local),
            rope_bases=tuple(float(base) for base in bases),
        ),
        layer_tensors=(
            *(role for role in spec.layer_tensors if role.target not in norms),
            *(norm(source, target) for target, source in _NORMS.items()),
            TensorRole("self_attn.gate_proj.weight", "attn_gate.weight"),
            _constant("attn_q_norm.weight", spec.head_dim, numbers["qk_scale_factor"]),
            _constant("attn_k_norm.weight", spec.head_dim, 1.0),
        ),
        keys={
            **spec.keys,
            "attention.sliding_window": window,
            "attention.sliding_window_pattern": list(is_local),
            "logit_scale": numbers["output_multiplier"],
            "final_logit_softcapping": softcap,
        },
    )


def _constant(target: str, n: int, value: float) -> TensorRole:
    """A norm's weight that checkpoints do not have."""
    made: Callable[[F32], F32] = lambda _: np.full(n, value, dtype=np.float32)  # noqa: E731
    return TensorRole("input_layernorm.weight", target, "vector", transform=made)


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    config, window = llama.config_of(stock), stock.window()
    if window is None:
        raise ConvertError(stock.where, "the key attention.sliding_window", "none")
    is_local = stock.local_layers(config["num_hidden_layers"], _PERIOD)
    return {
        **config,
        "sliding_window": window,
        "layer_types": layer_types(is_local),
        "layer_rope_theta": [config["rope_theta"] if local else 0 for local in is_local],
        "output_multiplier": stock.number("logit_scale", *limits.SCALE, default=1.0),
        "final_logit_softcapping": stock.number("final_logit_softcapping", *limits.SOFTCAP, default=0.0),
    }
