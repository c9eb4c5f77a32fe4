"""gpt_oss: gpt-oss (20B, 120B).

Sink logits, a sliding window in every second layer, experts with biases and a clamped gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .... import limits
from ....ir import F32, ModelSpec, TensorRole
from ... import rope
from ...stock import Stock
from .. import every_second, expert_keys, layer_types, llama, require

ARCHITECTURE = "gpt-oss"
STOCK_KEYS = ("expert_count", "expert_used_count")
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    require(config, "attention_bias", True, True)
    require(config, "swiglu_limit", 7.0, 7.0)
    require(config, "swiglu_alpha", 1.702, 1.702)
    has_rope = config.get("rope_parameters") or config.get("rope_scaling")
    config = {"head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, **config}
    config = config if has_rope else {**config, "rope_parameters": _YARN}
    parameters = rope.parameters(config)
    is_cut = bool(parameters.pop("truncate", True))
    spec = llama.model_spec(
        {**config, "mlp_bias": False, "rope_scaling": None, "rope_parameters": parameters}
    )
    n_expert = int(config.get("num_local_experts", 128))
    n_used = int(config.get("num_experts_per_tok", 4))
    window = limits.number("config.json", "sliding_window", config.get("sliding_window") or 0, *limits.WINDOW)
    is_local = every_second(config, spec.n_layer, ARCHITECTURE)
    kept = [role for role in spec.layer_tensors if role.target.startswith("attn_")]
    return replace(
        spec,
        gguf_arch=ARCHITECTURE,
        block=replace(
            spec.block,
            activation="swiglu_oai",
            ffn="experts",
            rope_pairing="neox",
            yarn_truncate=is_cut,
            windows=tuple(int(window) if local else 0 for local in is_local),
        ),
        layer_tensors=(
            *kept,
            TensorRole("self_attn.sinks", "attn_sinks.weight", "vector"),
            TensorRole("post_attention_layernorm.weight", "post_attention_norm.weight", "vector"),
            TensorRole("mlp.router.weight", "ffn_gate_inp.weight", "vector"),
            TensorRole("mlp.router.bias", "ffn_gate_inp.bias", "vector"),
            *_experts(),
        ),
        keys={
            **spec.keys,
            "attention.sliding_window": int(window),
            **expert_keys(n_expert, n_used, spec.keys["feed_forward_length"]),
        },
    )


def _experts() -> list[TensorRole]:
    """Stacked in the checkpoint, [n_expert, in, out], rows of gate and up in turn."""
    roles = []
    for name, source, begin in (("gate", "gate_up", 0), ("up", "gate_up", 1), ("down", "down", None)):
        prefix = f"mlp.experts.{source}_proj"
        roles.append(TensorRole(prefix, f"ffn_{name}_exps.weight", transform=_outputs(begin, -2)))
        roles.append(
            TensorRole(f"{prefix}_bias", f"ffn_{name}_exps.bias", "vector", transform=_outputs(begin, -1))
        )
    return roles


def _outputs(begin: int | None, axis: int) -> Callable[[F32], F32]:
    """A weight's outputs before its inputs (axis -2), and of outputs every second: views."""

    def pick(array: F32) -> F32:
        turned = array.swapaxes(-1, -2) if axis == -2 else array
        if begin is not None:
            turned = turned[:, begin::2]
        return turned

    return pick


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    config = llama.config_of(stock)
    n_used = stock.whole("expert_used_count", 1, 4096)
    window = stock.window()
    is_local = [bool(window) and layer % 2 == 0 for layer in range(config["num_hidden_layers"])]
    return {
        **config,
        "attention_bias": True,
        "intermediate_size": stock.whole("expert_feed_forward_length", 1, 1 << 22),
        "num_local_experts": stock.whole("expert_count", 2, 4096),
        "num_experts_per_tok": n_used,
        "sliding_window": window,
        "layer_types": layer_types(is_local),
        "rope_parameters": {"rope_type": "default", "truncate": False},
    }
