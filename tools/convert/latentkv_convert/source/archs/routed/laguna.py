"""laguna: Laguna XS, S and M.

Qwen 3's attention; in most models most layers have a sliding window, more query heads and unscaled RoPE.
Attention's output is gated, and all but the first layers have experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .... import limits
from ....errors import ConvertError
from ....ir import HeadShape, ModelSpec, TensorRole
from ... import rope
from ...stock import Stock
from .. import (
    FULL,
    LOCAL,
    bases_by_kind,
    layer_types,
    local_layers,
    qwen3,
    require,
    ropes_by_kind,
    routed,
    warn_of_readers,
)

STOCK_KEYS = routed.STOCK_KEYS
_PERIOD = 4  # of so many layers the first has no window
_FIELDS = {
    "n_expert": "num_experts",
    "n_used": "num_experts_per_tok",
    "width": "moe_intermediate_size",
    "shared": "shared_expert_intermediate_size",
    "scale": "moe_routed_scaling_factor",
}
_NAMES = routed.Names(bias="mlp.experts.e_score_correction_bias", shared="mlp.shared_expert.*_proj.weight")
_GATES = {True: "per-head", "per-head": "per-head", "per_head": "per-head"}
_GATES |= {"per-element": "per-element", "per_element": "per-element"}


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    require(config, "attention_bias", False, False)
    require(config, "moe_router_logit_softcapping", 0.0, 0.0, None)
    require(config, "moe_apply_router_weight_on_input", False, False)
    require(config, "gating", True, *_GATES)
    n_layer = int(config["num_hidden_layers"])
    is_local = local_layers(config, [False] * n_layer)
    window = int(config.get("sliding_window") or 0) if any(is_local) else 0
    usual = {
        FULL: {"rope_theta": 500000.0, "partial_rotary_factor": 0.5},
        LOCAL: {"rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    }
    ropes = ropes_by_kind(config, usual[FULL], usual[LOCAL])
    plain = {"rope_scaling": None, "rope_parameters": None, "rope_theta": 10000.0, "sliding_window": None}
    spec = qwen3.model_spec({"rms_norm_eps": 1e-6, "num_key_value_heads": 8, **config, **plain})
    n_rot = {kind: _rotated(spec.head_dim, ropes[kind]) for kind in ropes}
    base = bases_by_kind(ropes)
    counts = list(config.get("num_attention_heads_per_layer") or [spec.n_head] * n_layer)
    if len(counts) != n_layer:
        raise ConvertError(
            "config.json", f"{n_layer} values of num_attention_heads_per_layer", str(len(counts))
        )
    kinds = layer_types(is_local)
    heads = tuple(_shape(spec, int(n), n_rot[kind]) for n, kind in zip(counts, kinds, strict=True))
    if window and is_local != [layer % _PERIOD != 0 for layer in range(n_layer)]:
        warn_of_readers(f"no window in every layer {_PERIOD}, from the first, for stock readers of laguna")
    sparse = config.get("mlp_layer_types") or ["dense"] + ["sparse"] * (n_layer - 1)
    experts = routed.of_config(config, _FIELDS, n_dense=routed.dense_layers(sparse))
    full = rope.describe({**config, "rope_scaling": None, "rope_parameters": ropes[FULL]}, n_rot[FULL])
    gate = TensorRole("self_attn.g_proj.weight", "attn_gate.weight")
    spec = replace(
        spec,
        gguf_arch="laguna",
        n_head=max(shape.n_head for shape in heads),
        block=replace(
            spec.block,
            gate="softplus",
            windows=tuple(window if local else 0 for local in is_local),
            rope_bases=tuple(base[kind] for kind in kinds),
            rope_scaled=tuple(not local for local in is_local),
        ),
        layer_tensors=(*spec.layer_tensors, gate),
        keys={**spec.keys, **full.keys, **_keys(counts, n_rot, base, window)},
        heads=heads,
        extra_tensors=full.tensors,
    )
    return routed.with_experts(spec, experts, _NAMES)


def _rotated(head_dim: int, of: Mapping[str, Any]) -> int:
    return int(
        head_dim * limits.number("rope", "partial_rotary_factor", of.get("partial_rotary_factor", 1.0), 0, 1)
    )


def _shape(spec: ModelSpec, n_head: int, n_rot: int) -> HeadShape:
    if not 1 <= n_head <= 4096 or n_head % spec.n_kv:
        raise ConvertError("config.json", f"query heads divisible by {spec.n_kv} KV heads", str(n_head))
    if n_rot < 2 or n_rot % 2:
        raise ConvertError(
            "config.json", f"RoPE over an even number of a head's {spec.head_dim} dimensions", str(n_rot)
        )
    return HeadShape(spec.n_kv, spec.head_dim, n_rot, n_head)


def _keys(
    counts: list[int], n_rot: Mapping[str, int], base: Mapping[str, float], window: int
) -> dict[str, Any]:
    """Stock keys of what differs between layers."""
    keys: dict[str, Any] = {"attention.head_count": counts, "rope.dimension_count": n_rot[FULL]}
    if window:
        keys |= {
            "attention.sliding_window": window,
            "rope.freq_base_swa": base[LOCAL],
            "rope.dimension_count_swa": n_rot[LOCAL],
        }
    return keys


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    n_layer, window = stock.n_layer(), stock.window()
    is_local = [bool(window) and local for local in stock.local_layers(n_layer, _PERIOD, first_is_full=True)]
    layers = [stock.of_layer(layer, local) for layer, local in enumerate(is_local)]
    sizes = [layer.sizes() for layer in layers]
    shares = {
        kind: of.whole("rope.dimension_count", 2, 4096, size["head_dim"]) / size["head_dim"]
        for kind, of, size in zip(layer_types(is_local), layers, sizes, strict=True)
    }
    local_base = stock.number("rope.freq_base_swa", *limits.ROPE_BASE, default=sizes[0]["rope_theta"])
    found = routed.of_stock(stock, {**_FIELDS, "n_dense": "n_dense"})
    n_dense = found.pop("n_dense")
    routed.require_sigmoid(stock)
    return {
        **sizes[0],
        **found,
        "rms_norm_eps": stock.number("attention.layer_norm_rms_epsilon", 0, 1),
        "num_attention_heads_per_layer": [size["num_attention_heads"] for size in sizes],
        "mlp_layer_types": ["dense"] * n_dense + ["sparse"] * (n_layer - n_dense),
        "gating": True,
        "sliding_window": window or 0,
        "layer_types": layer_types(is_local),
        "rope_parameters": {
            FULL: {"rope_theta": sizes[0]["rope_theta"], "partial_rotary_factor": shares.get(FULL, 1.0)},
            LOCAL: {"rope_theta": local_base, "partial_rotary_factor": shares.get(LOCAL, 1.0)},
        },
    }
