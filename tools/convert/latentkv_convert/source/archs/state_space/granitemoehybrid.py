"""granitemoehybrid: Granite 4.0 (350M to 32B), with Mamba-2 or without.

Granite's scales in a block whose layers are Mamba-2 or attend, mostly without RoPE; FFNs with experts and one
that every token has, or that one alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ....errors import ConvertError
from ....ir import F32, ModelSpec, TensorRole
from ...stock import Stock
from .. import expert_keys, granite, llama, require
from . import config_sizes, kv_heads, recurrent, recurring, sizes_of

ARCHITECTURE = "granitehybrid"
STOCK_KEYS = (*granite.STOCK_KEYS, "expert_count", "expert_used_count")
_SIZES = {
    "heads": "mamba_n_heads",
    "width": "mamba_d_head",
    "state": "mamba_d_state",
    "groups": "mamba_n_groups",
    "kernel": "mamba_d_conv",
}
_DEFAULTS = {"mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_d_state": 256, "mamba_n_groups": 1}
_DEFAULTS |= {"mamba_d_conv": 4, "mamba_expand": 2, "shared_intermediate_size": 1024}


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    for name in ("attention_bias", "mamba_proj_bias"):
        require(config, name, False, False)
    require(config, "position_embedding_type", None, None, "nope", "rope")
    require(config, "hidden_act", "silu", "silu")
    n_expert, config = int(config.get("num_local_experts", 8) or 0), {**_DEFAULTS, **config}
    n_shared, n_layer = int(config["shared_intermediate_size"]), int(config["num_hidden_layers"])
    recurs = recurring(list(config.get("layer_types") or ["mamba"] * n_layer), n_layer)
    width = int(config["intermediate_size"]) if n_expert else n_shared
    spec = granite.model_spec({**config, "intermediate_size": width})
    ffn = _ffn(n_shared, _experts(n_expert, width) if n_expert else ())
    rotates = config.get("position_embedding_type") == "rope"
    layer = tuple(role for role in spec.layer_tensors if not role.target.startswith("ffn_"))
    layer = tuple(role if rotates else replace(role, rope_heads=0) for role in layer)
    keys = {name: value for name, value in spec.keys.items() if rotates or not name.startswith("rope.")}
    if n_expert:
        keys |= expert_keys(n_expert, int(config.get("num_experts_per_tok", 2)), width)
        keys["expert_shared_feed_forward_length"] = n_shared
    block = replace(
        spec.block,
        ffn="experts" if n_expert else "gated",
        position="rope" if rotates else "none",
    )
    spec = replace(
        spec,
        n_rot=spec.n_rot if rotates else 0,
        block=block,
        layer_tensors=(*layer, NORM, *ffn),
        keys={**keys, "rope.scaling.finetuned": rotates},
    )
    return _with_recurrence(spec, config, recurs, ffn) if any(recurs) else _dense(spec, n_expert)


NORM = TensorRole("post_attention_layernorm.weight", "ffn_norm.weight", "vector")


def _dense(spec: ModelSpec, n_expert: int) -> ModelSpec:
    """Where every layer attends, a file is a Granite."""
    if n_expert:
        raise ConvertError("config.json", "a layer of Mamba-2 beside experts", "none")
    if spec.block.position != "rope":
        raise ConvertError("config.json", "RoPE where all layers attend", "none")
    return spec


def _with_recurrence(
    spec: ModelSpec, config: Mapping[str, Any], recurs: list[bool], ffn: tuple[TensorRole, ...]
) -> ModelSpec:
    inner = int(config["mamba_expand"]) * spec.n_embd
    if config["mamba_d_head"] == "auto":
        config = {**config, "mamba_d_head": inner // int(config["mamba_n_heads"])}
    sizes = config_sizes(config, _SIZES)
    if sizes.inner != inner:
        expected = f"mamba_n_heads times mamba_d_head {inner}, mamba_expand times hidden_size"
        raise ConvertError("config.json", expected, str(sizes.inner))
    mixer = recurrent("mamba", sizes, bool(config.get("mamba_conv_bias", True)))
    norm = next(role for role in spec.layer_tensors if role.target == "attn_norm.weight")
    return replace(
        spec,
        gguf_arch=ARCHITECTURE,
        block=replace(
            spec.block,
            mixers=tuple("mamba2" if recurs_here else "attention" for recurs_here in recurs),
        ),
        recurrent_tensors=(norm, *mixer, NORM, *ffn),
        keys={
            **spec.keys,
            **sizes.keys,
            "attention.head_count_kv": [0 if recurs_here else spec.n_kv for recurs_here in recurs],
        },
    )


def _rows(first: int, n: int) -> Any:
    return np.arange(first, first + n)


def _ffn(n_ff: int, experts: tuple[TensorRole, ...]) -> tuple[TensorRole, ...]:
    """That of every token, whose gate and up are packed."""
    end = "_shexp" if experts else ""
    packed = "shared_mlp.input_linear.weight"
    return (
        *experts,
        TensorRole(packed, f"ffn_gate{end}.weight", rows=_rows(0, n_ff)),
        TensorRole(packed, f"ffn_up{end}.weight", rows=_rows(n_ff, n_ff)),
        TensorRole("shared_mlp.output_linear.weight", f"ffn_down{end}.weight"),
    )


def _experts(n_expert: int, n_ff: int) -> tuple[TensorRole, ...]:
    """[n_expert, 2 n_ff, n_embd] with gates before ups, and [n_expert, n_embd, n_ff]."""
    moe = "block_sparse_moe"
    cuts: dict[str, tuple[str, str, Callable[[F32], F32] | None]] = {
        "gate": ("input_linear.weight", "experts.gate_up_proj", lambda both: both[:, :n_ff]),
        "up": ("input_linear.weight", "experts.gate_up_proj", lambda both: both[:, n_ff:]),
        "down": ("output_linear.weight", "experts.down_proj", None),
    }
    router = TensorRole(f"{moe}.router.weight", "ffn_gate_inp.weight", "vector")
    roles = [TensorRole(f"{moe}.router.layer.weight", router.target, "vector", otherwise=router)]
    for name, (source, newer, cut) in cuts.items():
        target = f"ffn_{name}_exps.weight"
        other = TensorRole(f"{moe}.{newer}", target, transform=cut)
        roles.append(TensorRole(f"{moe}.{source}", target, transform=cut, otherwise=other))
    return tuple(roles)


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    n_layer = stock.n_layer()
    counts = kv_heads(stock, n_layer)
    attends = next(layer for layer, n in enumerate(counts) if n)
    config = granite.scales_of(stock, llama.config_of(stock.of_layer(attends, False)))
    sizes = sizes_of(stock)
    n_expert = stock.whole("expert_count", 0, 4096, 0)
    width = config["intermediate_size"]
    return {
        **config,
        **{field: getattr(sizes, name) for name, field in _SIZES.items()},
        "mamba_expand": sizes.inner // config["hidden_size"],
        "mamba_conv_bias": True,
        "layer_types": ["attention" if n else "mamba" for n in counts],
        "position_embedding_type": "rope" if stock.values.get("rope.scaling.finetuned", True) else "nope",
        "num_local_experts": n_expert,
        "num_experts_per_tok": stock.whole("expert_used_count", 1, 4096) if n_expert else 0,
        "shared_intermediate_size": stock.whole("expert_shared_feed_forward_length", 1, 1 << 22, width),
    }
