"""gemma4: Gemma 4, text (31B, 26B-A4B, 12B, E2B, E4B).

Gemma 3's norms and windows. Global layers have wider heads, of which a quarter turns, and may make V of the
key projection; V is normed in every layer, scores are not scaled, and a layer's output is. Experts, where
there are some, stand beside the FFN. E2B and E4B embed tokens in every layer, and their last layers read the
K and V of earlier ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from .... import limits
from ....errors import ConvertError
from ....ir import F32, HeadShape, ModelSpec, TensorRole
from ...stock import Stock
from .. import FULL, LOCAL, bases_by_kind, expert_keys, layer_types, local_layers, require, ropes_by_kind
from . import gemma3_text

OTHER_TYPES = ("gemma4_unified",)
STOCK_KEYS = ("final_logit_softcapping", "expert_count", "expert_used_count")
TEXT_PREFIX = "model.language_model"
_PERIOD = 6  # of every so many layers the last sees all tokens
_UNTURNED = 1e30  # divides the frequency of a plane that does not turn, for readers that know no other way
_BESIDE_EXPERTS = {  # source -> target, all vectors
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}
_IN_LAYERS = {
    "per_layer_input_gate.weight": "inp_gate.weight",
    "per_layer_projection.weight": "proj.weight",
    "post_per_layer_input_norm.weight": "post_norm.weight",
}
_FOR_LAYERS = {
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}
_GLOBAL = {"head_dim": ("global_head_dim", 512), "num_key_value_heads": ("num_global_key_value_heads", None)}


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    require(config, "attention_bias", False, False)
    if "unified" in str(config.get("declared_type", config["model_type"])):  # the 12B model
        config = {"hidden_size_per_layer_input": 0, "sliding_window": 1024, **config}
    n_layer = int(config["num_hidden_layers"])
    first = n_layer - int(config.get("num_kv_shared_layers") or 0)  # of those that share K and V
    if not 0 < first <= n_layer:
        raise ConvertError("config.json", f"num_kv_shared_layers below {n_layer}", f"{n_layer - first}")
    is_local = local_layers(config, [(layer + 1) % _PERIOD != 0 for layer in range(n_layer)])
    is_local[-1] = False  # as transformers has it
    usual = {FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}}
    ropes = ropes_by_kind(config, usual[FULL], {"rope_theta": 1e4})
    spec = gemma3_text.as_llama(config, {"rope_theta": ropes[FULL]["rope_theta"]})
    heads = tuple(
        replace(_shape(config, spec, layer, local), shares_kv=layer >= first)
        for layer, local in enumerate(is_local)
    )
    if set(is_local[first:]) - set(is_local[:first]):
        raise ConvertError("config.json", "a layer of every kind with K and V of its own", f"{first} layers")
    brought = int(config.get("hidden_size_per_layer_input", 256) or 0)
    if brought:
        require(config, "vocab_size_per_layer_input", spec.n_vocab, spec.n_vocab)
    base = bases_by_kind(ropes)
    window = int(config.get("sliding_window") or 512)
    softcap = float(config.get("final_logit_softcapping") or 0.0)
    norms = {target: f"{source}.weight" for target, source in gemma3_text.NORMS.items()}
    experts = _experts(config) if config.get("enable_moe_block") else {}
    return replace(
        spec,
        gguf_arch="gemma4",
        block=replace(
            spec.block,
            ffn="gated_and_experts" if experts else "gated",
            rope_pairing="neox",
            embedding_scale=math.sqrt(spec.n_embd),
            attention_scale=1.0,
            logit_softcap=softcap,
            windows=tuple(window if local else 0 for local in is_local),
            rope_bases=tuple(base[kind] for kind in layer_types(is_local)),
            rope_scaled=tuple(not local for local in is_local),
            value_norm=True,
            value_of_key=any(shape.value_of_key for shape in heads),
        ),
        layer_tensors=(
            *(role for role in spec.layer_tensors if role.target not in norms),
            *(TensorRole(source, target, "vector") for target, source in norms.items()),
            TensorRole("layer_scalar", "layer_output_scale.weight", "vector"),
            *(_expert_tensors() if experts else ()),
            *(_vectors_and_maps(_IN_LAYERS) if brought else ()),
        ),
        global_tensors=(*spec.global_tensors, *(_vectors_and_maps(_FOR_LAYERS) if brought else ())),
        keys={
            **spec.keys,
            **_keys(heads, is_local, window, base[LOCAL], softcap),
            **experts,
            **_wider(config, spec, first),
            "embedding_length_per_layer_input": brought,
        },
        extra_tensors=_divisors(ropes[FULL], heads, is_local),
        heads=heads,
    )


def _shape(config: Mapping[str, Any], spec: ModelSpec, layer: int, local: bool) -> HeadShape:
    """Of one layer: the config's own, or what it says of global layers."""
    own = (config.get("per_layer_config") or {}).get(str(layer), {})
    is_shared = bool(config.get("attention_k_eq_v")) and not local
    sizes = {"head_dim": spec.head_dim, "num_key_value_heads": spec.n_kv}
    if not local:
        for name, (of_global, usual) in _GLOBAL.items():
            if name == "head_dim" or is_shared:
                sizes[name] = int(config.get(of_global) or usual or sizes[name])
    sizes |= {name: int(value) for name, value in own.items()}
    n_kv, head_dim = sizes["num_key_value_heads"], sizes["head_dim"]
    if n_kv < 1 or spec.n_head % n_kv or head_dim < 2 or head_dim % 2:
        wanted = f"layer {layer} with a divisor of {spec.n_head} KV heads of an even width"
        raise ConvertError("config.json", wanted, f"{n_kv} of {head_dim}")
    return HeadShape(n_kv, head_dim, head_dim, spec.n_head, is_shared)


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Stock keys."""
    counts = ("num_experts", "top_k_experts", "moe_intermediate_size")
    limits.check_config({"num_experts_per_tok": config["top_k_experts"]})
    return expert_keys(*(int(config[name]) for name in counts))


def _wider(config: Mapping[str, Any], spec: ModelSpec, first: int) -> dict[str, Any]:
    """Layers that share K and V may have FFNs of twice the width."""
    n_ff = spec.keys["feed_forward_length"]
    if not config.get("use_double_wide_mlp") or first == spec.n_layer:
        return {}
    return {"feed_forward_length": [n_ff * (1 if layer < first else 2) for layer in range(spec.n_layer)]}


def _vectors_and_maps(names: Mapping[str, str]) -> Iterator[TensorRole]:
    for source, target in names.items():
        kind = "table" if "token_embd" in target else "vector" if "norm" in target else "weight"
        yield TensorRole(source, target, kind)


def _expert_tensors() -> tuple[TensorRole, ...]:
    return (
        *(TensorRole(source, target, "vector") for source, target in _BESIDE_EXPERTS.items()),
        TensorRole("experts.gate_up_proj", "ffn_gate_up_exps.weight"),
        TensorRole("experts.down_proj", "ffn_down_exps.weight"),
    )


def _keys(
    heads: tuple[HeadShape, ...], is_local: list[bool], window: int, local_base: float, softcap: float
) -> dict[str, Any]:
    """Stock keys of what differs between layers."""
    widths = {
        local: {s.head_dim for s, own in zip(heads, is_local, strict=True) if own == local}
        for local in (False, True)
    }
    for local, found in widths.items():
        if len(found) > 1:
            kind = LOCAL if local else FULL
            raise ConvertError("config.json", f"one head_dim in all layers of {kind}", f"{sorted(found)}")
    (wide,), (narrow,) = widths[False], widths[True] or {heads[0].head_dim}
    counts = [shape.n_kv for shape in heads]
    keys: dict[str, Any] = {
        "attention.head_count_kv": counts[0] if len(set(counts)) == 1 else counts,
        "attention.sliding_window": window,
        "attention.sliding_window_pattern": list(is_local),
        "attention.shared_kv_layers": sum(shape.shares_kv for shape in heads),
        "rope.freq_base_swa": local_base,
    }
    for name in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        keys |= {name: wide, f"{name}_swa": narrow}
    return keys | ({"final_logit_softcapping": softcap} if softcap else {})


def _divisors(rope: Mapping[str, Any], heads: tuple[HeadShape, ...], is_local: list[bool]) -> dict[str, F32]:
    """[head_dim/2] of RoPE's frequencies in global layers: planes of the first share of a head turn."""
    require(rope, "rope_type", "default", "default", "proportional")
    n = heads[is_local.index(False)].head_dim // 2
    factors = np.ones(n, dtype=np.float32)
    if rope.get("rope_type") == "proportional":
        factors *= np.float32(limits.number("rope", "factor", rope.get("factor", 1.0), *limits.ROPE_FACTOR))
        share = limits.number("rope", "partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), 0, 1)
        factors[int(share * n) :] = _UNTURNED
    return {"rope_freqs.weight": factors}


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    n_layer = stock.whole("block_count", 1, 4096)
    n_shared = stock.whole("attention.shared_kv_layers", 0, n_layer - 1, 0)
    window = stock.window()
    is_local = [bool(window) and local for local in stock.local_layers(n_layer, _PERIOD)]
    layers = [stock.of_layer(layer, local) for layer, local in enumerate(is_local)]
    sizes = [layer.sizes() for layer in layers]
    if is_local[-1]:
        raise ConvertError(stock.where, "a last layer without a window", "one with it")
    widths = [of["intermediate_size"] for of in sizes]
    is_wide = n_shared > 0 and widths[-1] == 2 * widths[0]
    if widths != [widths[0]] * (n_layer - n_shared) + [widths[0] * (2 if is_wide else 1)] * n_shared:
        wanted = "feed_forward_length once, or twice as much in layers that share K and V"
        raise ConvertError(stock.where, wanted, str(widths)[:60])
    names = ("head_dim", "num_key_value_heads")
    own = [layer for layer in range(n_layer - n_shared) if not is_local[layer]]
    is_shared = bool(own) and not stock.has_in("attn_v.weight", own[-1])
    return {
        **sizes[is_local.index(True) if any(is_local) else 0],
        "per_layer_config": {str(i): {name: of[name] for name in names} for i, of in enumerate(sizes)},
        "attention_k_eq_v": is_shared,
        "rms_norm_eps": stock.number("attention.layer_norm_rms_epsilon", 0, 1),
        "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": sizes[-1]["rope_theta"]},
            LOCAL: {"rope_theta": stock.number("rope.freq_base_swa", *limits.ROPE_BASE, default=1e4)},
        },
        "sliding_window": window,
        "layer_types": layer_types(is_local),
        "final_logit_softcapping": stock.number("final_logit_softcapping", 0, 1e6, 0.0),
        "hidden_size_per_layer_input": stock.whole("embedding_length_per_layer_input", 0, 1 << 16, 0),
        "vocab_size_per_layer_input": stock.n_vocab,
        "num_kv_shared_layers": n_shared,
        "use_double_wide_mlp": is_wide,
        **(_experts_of(stock) if stock.values.get("expert_count") else {}),
    }


def _experts_of(stock: Stock) -> dict[str, Any]:
    return {
        "enable_moe_block": True,
        "num_experts": stock.whole("expert_count", 2, 4096),
        "top_k_experts": stock.whole("expert_used_count", 1, 4096),
        "moe_intermediate_size": stock.whole("expert_feed_forward_length", 1, 1 << 22),
    }
