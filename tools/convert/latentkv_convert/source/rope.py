"""RoPE scaling of a transformers config as GGUF keys and tensors: linear, dynamic, llama3, yarn, longrope.

The keys are stock; docs/gguf.md says how a reader combines them. All frequencies are radians per position.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import ConvertError
from ..ir import F32
from ..limits import ATTENTION_FACTOR, ROPE_BASE, ROPE_FACTOR, YARN_BETA, number

_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "su")  # "su": first Phi-3 configs

_KNOWN = {
    *(
        "rope_theta",
        "rope_type",
        "type",
        "partial_rotary_factor",
        "factor",
        "original_max_position_embeddings",
    ),
    *("attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
    *("long_factor", "short_factor", "low_freq_factor", "high_freq_factor"),
    *("finetuned",),  # which says where the numbers are from
}


@dataclass(frozen=True)
class Rope:
    keys: Mapping[str, Any]  # stock keys without the architecture prefix
    freq_factors: F32 | None = None  # [n_rot/2] divides each frequency; rope_freqs.weight
    long_factors: F32 | None = None  # [n_rot/2] the same past the original context; rope_factors_long.weight
    short_factors: F32 | None = None  # [n_rot/2] and up to it; rope_factors_short.weight
    latentkv_keys: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, F32]:
        """The stock tensors that carry the factors."""
        named = {
            "rope_freqs.weight": self.freq_factors,
            "rope_factors_long.weight": self.long_factors,
            "rope_factors_short.weight": self.short_factors,
        }
        return {name: factors for name, factors in named.items() if factors is not None}


def parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """rope_parameters of transformers 5, or rope_theta and rope_scaling of earlier configs, in one shape."""
    rope: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        rope |= _of_every_layer(config, name)
    if unknown := sorted(set(rope) - _KNOWN):
        raise ConvertError("config.json", f"RoPE parameters {', '.join(sorted(_KNOWN))}", ", ".join(unknown))
    rope["rope_type"] = rope.get("rope_type", rope.get("type")) or "default"
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    return rope


def rotated_share(config: Mapping[str, Any], usual: float) -> float:
    """The share of a head that rotates. usual: where the config does not say."""
    of_config = config.get("partial_rotary_factor", usual)
    return float(parameters(config).get("partial_rotary_factor", of_config))


def _of_every_layer(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What a field says of RoPE; of one with an entry for every kind of layer what all kinds have.

    Raises:
        ConvertError: entries that differ, or a kind of layer without one.
    """
    given = config.get(name) or {}
    if not isinstance(given, Mapping):
        raise ConvertError("config.json", f"{name} with names and values", str(given)[:40])
    by_kind = {kind: entry for kind, entry in given.items() if isinstance(entry, Mapping)}
    if not by_kind:
        return dict(given)
    kinds = sorted(set(map(str, config.get("layer_types") or by_kind)))
    if missing := [kind for kind in kinds if kind not in by_kind]:
        raise ConvertError("config.json", f"{name} of every kind of layer", f"none of {missing[0]}")
    first, *others = (by_kind[kind] for kind in kinds)
    if any(other != first for other in others):
        raise ConvertError(
            "config.json", f"the same {name} in every layer", f"others in {' and '.join(kinds)}"
        )
    flat = {key: value for key, value in given.items() if key not in by_kind}
    return flat | dict(first)


def original_context(config: Mapping[str, Any], rope: Mapping[str, Any]) -> int:
    got = rope.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    context = got or config["max_position_embeddings"]
    return int(number("rope", "original_max_position_embeddings", context, 1, 1 << 30))


def describe(config: Mapping[str, Any], n_rot: int) -> Rope:
    """Keys and factors for a model whose `n_rot` first head dimensions are rotated.

    Raises:
        ConvertError: a scaling type that no GGUF key can carry.
    """
    rope = parameters(config)
    kind = rope["rope_type"]
    if kind not in _TYPES:
        raise ConvertError("rope", f"rope_type {', '.join(_TYPES[:-2])} or {_TYPES[-2]}", str(kind))
    base = number("rope", "rope_theta", rope["rope_theta"], *ROPE_BASE)
    keys: dict[str, Any] = {"rope.dimension_count": n_rot, "rope.freq_base": base}
    if kind == "default":
        return Rope(keys)
    if kind in ("longrope", "su"):
        return _longrope(config, rope, keys, n_rot)
    if "factor" not in rope:
        raise ConvertError("rope", f"a factor for rope_type {kind}", f"{sorted(rope)}")
    factor = number("rope", "factor", rope["factor"], *ROPE_FACTOR)
    if kind == "linear":
        return Rope(keys | {"rope.scaling.type": "linear", "rope.scaling.factor": factor})
    if kind == "dynamic":
        return Rope(keys, latentkv_keys={"rope_dynamic_factor": factor})
    if kind == "llama3":
        return Rope(keys, freq_factors=llama3_factors(config, rope, n_rot))
    return Rope(keys | _yarn(config, rope, factor))


def llama3_factors(config: Mapping[str, Any], rope: Mapping[str, Any], n_rot: int) -> F32:
    """[n_rot/2] divisors of the frequencies (transformers `rope_type: llama3`): 1 for short waves, `factor`
    for long ones, and in between the reciprocal of a blend of the two frequencies."""
    factor, low, high = (float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    context = original_context(config, rope)
    wavelen = 2 * math.pi * float(rope["rope_theta"]) ** (np.arange(0, n_rot, 2, dtype=np.float64) / n_rot)
    smooth = np.clip((context / wavelen - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / factor + smooth)).astype(np.float32)


def _longrope(config: Mapping[str, Any], rope: Mapping[str, Any], keys: dict[str, Any], n_rot: int) -> Rope:
    """LongRoPE (Ding et al. 2024) as transformers computes it: a divisor per frequency, one set up to the
    original context and one beyond, and cos and sin times sqrt(1 + ln(factor) / ln(original))."""
    original = original_context(config, rope)
    factors = {}
    for name in ("long_factor", "short_factor"):
        factors[name] = np.asarray(rope.get(name) or (), dtype=np.float32)
        if factors[name].shape != (n_rot // 2,):
            raise ConvertError("rope", f"{n_rot // 2} values of {name}", f"{factors[name].size}")
    factor = rope.get("factor") or config["max_position_embeddings"] / original
    factor = number("rope", "factor", factor, *ROPE_FACTOR)
    attention = rope.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    keys = keys | {
        "rope.scaling.type": "longrope",
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": number("rope", "attention_factor", attention, *ATTENTION_FACTOR),
    }
    return Rope(keys, long_factors=factors["long_factor"], short_factors=factors["short_factor"])


def _yarn(config: Mapping[str, Any], rope: Mapping[str, Any], factor: float) -> dict[str, Any]:
    if rope.get("truncate", True) is False:
        raise ConvertError("rope", "yarn with truncate true (whole correction dimensions)", "truncate false")
    keys: dict[str, Any] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": original_context(config, rope),
    }
    for name in ("beta_fast", "beta_slow"):
        if rope.get(name):
            keys[f"rope.scaling.yarn_{name}"] = number("rope", name, rope[name], *YARN_BETA)
    # A reader multiplies cos and sin by attn_factor · (1 + 0.1 ln factor): store what is left of
    # transformers' factor.
    stock = _mscale(factor, 1.0)
    attention = rope.get("attention_factor")
    if attention is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        attention = _mscale(factor, float(rope["mscale"])) / _mscale(factor, float(rope["mscale_all_dim"]))
    if attention is not None and not math.isclose(attention, stock, rel_tol=1e-6):
        attention = number("rope", "attention_factor", attention, *ATTENTION_FACTOR)
        keys["rope.scaling.attn_factor"] = attention / stock
    return keys


def _mscale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
