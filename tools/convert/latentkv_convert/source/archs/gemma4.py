"""gemma4: Gemma 4, text (31B, 26B-A4B).

Gemma 3's norms and windows. Global layers have wider heads, of which a quarter turns, and may make V of the
key projection; V is normed in every layer, scores are not scaled, and a layer's output is. Experts, where
there are some, stand beside the FFN."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ... import limits
from ...errors import ConvertError
from ...ir import F32, HeadShape, ModelSpec, TensorRole
from ..stock import Stock
from . import FULL, LOCAL, expert_keys, gemma3_text, layer_types, llama, local_layers, require, ropes_by_kind

STOCK_KEYS = ("final_logit_softcapping", "expert_count", "expert_used_count")
TEXT_PREFIX = "model.language_model"
TINY: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # not hidden_size / num_attention_heads, on purpose
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    },
    "sliding_window": 48,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "final_logit_softcapping": 5.0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 320,
    "num_kv_shared_layers": 0,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
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
_GLOBAL = {"head_dim": ("global_head_dim", 512), "num_key_value_heads": ("num_global_key_value_heads", None)}


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    require(config, "attention_bias", False, False)
    require(config, "use_bidirectional_attention", None, None, "vision")  # of pictures alone
    require(config, "hidden_size_per_layer_input", 256, 0, None)
    require(config, "num_kv_shared_layers", 0, 0, None)
    n_layer = int(config["num_hidden_layers"])
    is_local = local_layers(config, [(layer + 1) % _PERIOD != 0 for layer in range(n_layer)])
    is_local[-1] = False  # as transformers has it
    usual = {FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}}
    ropes = ropes_by_kind(config, usual[FULL], {"rope_theta": 1e4})
    stock = {"head_dim": 256, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
    ours = {
        "mlp_bias": False,
        "hidden_act": config.get("hidden_activation", "gelu_pytorch_tanh"),
        "rope_scaling": None,
        "rope_parameters": {"rope_theta": ropes[FULL]["rope_theta"]},
    }
    spec = llama.model_spec(stock | dict(config) | ours)
    heads = tuple(_shape(config, spec, layer, local) for layer, local in enumerate(is_local))
    base = {
        kind: limits.number("rope", "rope_theta", of["rope_theta"], *limits.ROPE_BASE)
        for kind, of in ropes.items()
    }
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
        ),
        keys={**spec.keys, **_keys(heads, is_local, window, base[LOCAL], softcap), **experts},
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
    return HeadShape(n_kv, head_dim, head_dim, is_shared)


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Stock keys."""
    counts = ("num_experts", "top_k_experts", "moe_intermediate_size")
    limits.check_config({"num_experts_per_tok": config["top_k_experts"]})
    return expert_keys(*(int(config[name]) for name in counts))


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
        "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0,
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
    for name in ("attention.shared_kv_layers", "embedding_length_per_layer_input"):
        if stock.values.get(name):
            raise ConvertError(stock.where, f"{name} 0", str(stock.values[name])[:40])
    n_layer = stock.whole("block_count", 1, 4096)
    window = stock.window()
    is_local = [bool(window) and local for local in stock.local_layers(n_layer, _PERIOD)]
    layers = [stock.of_layer(layer, local) for layer, local in enumerate(is_local)]
    sizes = [layer.sizes() for layer in layers]
    if is_local[-1]:
        raise ConvertError(stock.where, "a last layer without a window", "one with it")
    names = ("head_dim", "num_key_value_heads")
    is_shared = not stock.has_in("attn_v.weight", n_layer - 1)
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
        "hidden_size_per_layer_input": 0,
        **(_experts_of(stock) if stock.values.get("expert_count") else {}),
    }


def _experts_of(stock: Stock) -> dict[str, Any]:
    if not stock.has("ffn_gate_up_exps.weight"):
        raise ConvertError(
            stock.where, "gate and up of experts in one tensor, ffn_gate_up_exps.weight", "none"
        )
    return {
        "enable_moe_block": True,
        "num_experts": stock.whole("expert_count", 2, 4096),
        "top_k_experts": stock.whole("expert_used_count", 1, 4096),
        "moe_intermediate_size": stock.whole("expert_feed_forward_length", 1, 1 << 22),
    }
