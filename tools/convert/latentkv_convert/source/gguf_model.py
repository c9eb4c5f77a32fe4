"""The decoder in a GGUF: the table of its architecture, changed by what the file itself says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from .. import limits
from ..errors import ConvertError
from ..ir import F32, ModelSpec, TensorRole
from ..schema import BLOCK_KEYS, KEYS
from . import archs, gguf_block, recurrent
from .archs import mla
from .gguf_file import GgufFile
from .stock import NO_ARCHITECTURE, Stock

_OURS = "latentkv."
# What a plain file of ours says; any other key belongs to a latent cache.
_PLAIN = {KEYS[name] for name in ("version", "source_method", "source_recipe", "rope_dynamic_factor")}
_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_FUSED = "ffn_gate_up_exps.weight"
_ROWS = ("ffn_gate_inp_shexp.weight", "exp_probs_b.bias")  # vectors that some files have as matrices of a row
_NUMBERS = {
    "rope.scaling.attn_factor": limits.ATTENTION_FACTOR,
    "rope.scaling.yarn_log_multiplier": limits.LOG_MULTIPLIER,
    "rope.scaling.yarn_beta_fast": limits.YARN_BETA,
    "rope.scaling.yarn_beta_slow": limits.YARN_BETA,
    "attention.clamp_kqv": limits.CLIP,
}
_SCALING_FACTORS = ("rope.scaling.factor", "rope.scale_linear")
_SCALINGS = ("none", "linear", "yarn", "longrope")


def prefix(layer: int | None) -> str:
    return "" if layer is None else f"blk.{layer}."


def packed_rows(spec: ModelSpec) -> Mapping[str, slice]:
    """The rows of Q, K and V in attn_qkv, in this order."""
    q, kv = spec.q_width, spec.kv_width
    return {"attn_q": slice(0, q), "attn_k": slice(q, q + kv), "attn_v": slice(q + kv, q + 2 * kv)}


def model_spec(parts: GgufFile, where: str) -> ModelSpec:
    """Raises:
    ConvertError: another architecture, a latent cache, or tensors that the keys do not promise.
    """
    values = {name: value.plain() for name, value in parts.values.items()}
    for key in values:
        if key.startswith(_OURS) and key not in _PLAIN | set(BLOCK_KEYS.values()):
            raise ConvertError(
                where, "full K and V", f"a latent cache ({key})", "convert what it was made of"
            )
    architecture = values.get("general.architecture")
    if not isinstance(architecture, str):
        raise ConvertError(where, "the key general.architecture", "none")
    stock = _stock(parts, where, architecture, values)
    config = archs.config_of(architecture, stock)
    try:
        spec = archs.model_spec(config)
    except ConvertError as error:
        raise error.at(where) from None  # there is no config.json
    spec = _with_experts_as_in(parts, spec)
    block = gguf_block.block(values, spec, where)
    spec = _with_rotated_dims(stock, replace(spec, block=block))
    scaled = [layer for layer in range(spec.n_layer) if block.rope_scaled is None or block.rope_scaled[layer]]
    spec = replace(
        spec,
        keys=_keys(stock, spec),
        extra_tensors=_factors(parts, spec.at(scaled[0] if scaled else 0).n_rot),
        latentkv_keys=_dynamic(values, where),
        layer_tensors=_present(parts, spec),
        recurrent_tensors=_without_absent_bias(parts, spec),
    )
    recurrent.check_pattern(spec, where, lambda role, layer: f"{prefix(layer)}{role}" in parts)
    _check_tensors(parts, spec, where)
    return spec


def _with_rotated_dims(stock: Stock, spec: ModelSpec) -> ModelSpec:
    """The architecture with the number of rotated dimensions that the file states."""
    name = "rope.dimension_count"
    if not spec.heads:
        return replace(spec, n_rot=stock.whole(name, 2, spec.head_dim, spec.n_rot) if spec.n_rot else 0)
    heads = []
    for layer, shape in enumerate(spec.heads):
        own = stock.of_layer(layer, spec.window(layer) > 0)
        heads.append(replace(shape, n_rot=own.whole(name, 2, shape.head_dim, shape.n_rot)))
    return replace(spec, heads=tuple(heads))


def _stock(parts: GgufFile, where: str, architecture: str, values: Mapping[str, Any]) -> Stock:
    dot = f"{architecture}."
    own = {name.removeprefix(dot): value for name, value in values.items() if name.startswith(dot)}
    own |= {name: value for name, value in values.items() if name.startswith(NO_ARCHITECTURE)}
    roles = {name.removeprefix("blk.0.") for name in parts.names()}
    return Stock(where, own, roles, parts.info("token_embd.weight").shape[0])


def _keys(stock: Stock, spec: ModelSpec) -> dict[str, Any]:
    """The stock keys of the config that stands for the file, overridden by the file's own keys."""
    keys = {**spec.keys, **stock.values} | _scaling(stock)
    for name, bounds in _NUMBERS.items():
        if name in stock.values:
            stock.number(name, *bounds)
    if "rope.scaling.original_context_length" in stock.values:
        stock.whole("rope.scaling.original_context_length", 1, 1 << 30)
    window = stock.window()
    keys |= {} if window is None else {"attention.sliding_window": window}
    for name in ("attention.clamp_kqv", "attention.sliding_window"):
        if not keys.get(name):
            keys.pop(name, None)  # 0 means none
    return keys


def _scaling(stock: Stock) -> dict[str, Any]:
    """Type and factor of RoPE's scaling as libllama reads them, for readers that want both. Without a type it
    is linear; of both keys of the factor the older one comes second, and 0 means 1."""
    kind = stock.values.get("rope.scaling.type", "linear")
    if kind not in _SCALINGS:
        raise ConvertError(stock.where, f"rope.scaling.type {', '.join(_SCALINGS)}", str(kind)[:40])
    name = next((name for name in _SCALING_FACTORS if name in stock.values), None)
    factor = 0.0
    if kind != "none" and name is not None and stock.values[name] != 0:
        factor = stock.number(name, *limits.ROPE_FACTOR)
    if "rope.scaling.type" not in stock.values and factor in (0.0, 1.0):
        return {}
    return {"rope.scaling.type": kind, "rope.scaling.factor": factor or 1.0}


def _factors(parts: GgufFile, n_rot: int) -> dict[str, F32]:
    """Divisors of RoPE frequencies that the file has."""
    found = {}
    for name in _FACTORS:
        if name not in parts:
            continue
        info = parts.info(name)
        if info.type != "f32" or info.shape != (n_rot // 2,):
            raise ConvertError(name, f"{n_rot // 2} values in f32", f"{list(info.shape)} in {info.type}")
        found[name] = np.array(parts.raw(name).view(np.float32).reshape(-1))
        if not (np.isfinite(found[name]) & (found[name] > 0)).all():
            raise ConvertError(name, "finite divisors above 0", "others")
    return found


def _dynamic(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    key = KEYS["rope_dynamic_factor"]
    if key not in values:
        return {}
    return {"rope_dynamic_factor": limits.number(where, key, values[key], *limits.ROPE_FACTOR)}


def _with_experts_as_in(parts: GgufFile, spec: ModelSpec) -> ModelSpec:
    """Gates and ups of experts in one tensor or in two, which llama.cpp reads alike."""
    is_fused = any(name.endswith(_FUSED) for name in parts.names())
    gate, up = "ffn_gate_exps.weight", "ffn_up_exps.weight"

    def as_in(roles: tuple[TensorRole, ...]) -> tuple[TensorRole, ...]:
        targets = {role.target for role in roles}
        if is_fused and gate in targets:
            fused = TensorRole("", _FUSED)
            return tuple(fused if role.target == gate else role for role in roles if role.target != up)
        if not is_fused and _FUSED in targets:
            halves = (TensorRole("", gate), TensorRole("", up))
            return (*(role for role in roles if role.target != _FUSED), *halves)
        return roles

    return replace(
        spec,
        layer_tensors=as_in(spec.layer_tensors),
        recurrent_tensors=as_in(spec.recurrent_tensors),
        fed_tensors=as_in(spec.fed_tensors),
    )


def _present(parts: GgufFile, spec: ModelSpec) -> tuple[TensorRole, ...]:
    """Roles of attention layers, without biases that this file lacks."""
    first = prefix(spec.attention_layers[0])
    return tuple(
        role
        for role in spec.layer_tensors
        if first + role.target in parts or ".bias" not in role.target or role.target.startswith("exp_")
    )


def _without_absent_bias(parts: GgufFile, spec: ModelSpec) -> tuple[TensorRole, ...]:
    """Roles of recurrent layers, without a convolution bias if this file lacks it."""
    first = next(filter(spec.recurs, range(spec.n_layer)), 0)
    absent = f"{prefix(first)}ssm_conv1d.bias" not in parts
    return tuple(role for role in spec.recurrent_tensors if not (absent and role.target == "ssm_conv1d.bias"))


def factors(parts: GgufFile, spec: ModelSpec) -> dict[str, str]:
    """Weights of the trunk -> their factors (NVFP4), which products with them are multiplied with."""
    found, end = {}, ".scale"
    own = {role.target for layer in range(spec.n_layer) for role in spec.tensors_of(layer)}
    others = set(behind(parts, spec))
    for name in parts.names():
        weight = f"{name.removesuffix(end)}.weight"
        role = name.split(".", 2)[2] if name.startswith("blk.") else name
        if name.endswith(end) and weight in parts and name not in others and role not in own:
            found[weight] = name
    return found


def behind(parts: GgufFile, spec: ModelSpec) -> list[str]:
    """Names of tensors in blocks after the decoder's layers, which predict further tokens."""
    begins = tuple(prefix(layer) for layer in range(spec.n_layer, int(spec.keys["block_count"])))
    return [name for name in parts.names() if name.startswith(begins)]


def _check_tensors(parts: GgufFile, spec: ModelSpec, where: str) -> None:
    """Checks that the file has every tensor of the architecture in its shape, and no other: an unknown tensor
    would change the model."""
    expected: dict[str, tuple[int, ...]] = {}
    for role in spec.global_tensors:
        expected[role.target] = _shape(spec, role.target)
    sides = ("qkv",) if spec.packed_qkv else ("q", "k", "v")
    for layer in range(spec.n_layer):
        own = spec.at(layer)
        roles = [role.target for role in spec.tensors_of(layer)]
        shapes = {role: _shape(own, role, layer) for role in roles}
        if not spec.attends(layer):
            shapes |= {role: shape for role, shape in recurrent.shapes(spec).items() if role in shapes}
            expected |= {prefix(layer) + role: shape for role, shape in shapes.items()}
            continue
        shapes |= {role: shape for role, shape in mla.shapes(spec).items() if role in shapes}
        if spec.mla is not None:
            expected |= {prefix(layer) + role: shape for role, shape in shapes.items()}
            continue
        held = [side for side in sides if not own.shares_kv and (side != "v" or not own.value_of_key)]
        roles = [f"attn_{side}.weight" for side in held]
        roles += [f"attn_{side}.bias" for side in held if f"{prefix(layer)}attn_{side}.bias" in parts]
        shapes |= {role: _shape(own, role) for role in roles}
        expected |= {prefix(layer) + role: shape for role, shape in shapes.items()}
    is_delta_net = recurrent.kind(spec) == "delta_net"
    if is_delta_net and any(name.endswith(".ssm_in.weight") for name in parts.names()):
        older = "ssm_in, which older converters write"
        raise ConvertError(where, "attn_qkv and attn_gate in recurrent layers", older, "get a newer file")
    for name, shape in expected.items():
        got = parts.info(name).shape
        is_wide = name.endswith("attn_gate.weight") and spec.block.gate != "none"  # of each number
        if is_wide and got == (shape[0] * spec.head_dim, spec.n_embd):
            continue
        if got != shape and not (got == (1, *shape) and name.endswith(_ROWS)):
            raise ConvertError(f"{where}: {name}", f"shape {list(shape)}", str(list(got)))
    of_weights = factors(parts, spec)
    for weight, name in of_weights.items():
        shape = parts.info(weight).shape
        if parts.info(name).type != "f32" or parts.info(name).shape != (shape[0] if len(shape) > 2 else 1,):
            found = f"{list(parts.info(name).shape)} in {parts.info(name).type}"
            raise ConvertError(f"{where}: {name}", f"a factor of {weight} in f32", found)
    # what llama.cpp's GPU code may round activations with
    inputs = {name.replace(".scale", ".input_scale") for name in of_weights.values()}
    known = {*expected, *spec.extra_tensors, *behind(parts, spec), *of_weights.values(), *inputs}
    for name in parts.names():
        if name not in known:
            raise ConvertError(where, f"tensors of the {spec.gguf_arch} architecture", name)


def _shape(spec: ModelSpec, role: str, layer: int = 0) -> tuple[int, ...]:
    stem, _, leaf = role.partition(".")
    widths = spec.keys.get("feed_forward_length", 0)
    n_ff = int(widths[layer] if isinstance(widths, list) else widths)
    if stem.endswith("_shexp"):
        n_ff = _shared_width(spec)
        shapes = {"ffn_gate_inp_shexp": (spec.n_embd,), "ffn_down_shexp": (spec.n_embd, n_ff)}
        return shapes.get(stem, (n_ff, spec.n_embd))
    if stem.startswith("ffn_latent"):
        shape = (spec.n_embd_expert, spec.n_embd)
        return shape if stem == "ffn_latent_down" else shape[::-1]
    if stem.startswith("ffn_gate_inp") or stem.endswith(("_exps", "exp_probs_b")):
        return _expert_shape(spec, stem, leaf)
    brought = int(spec.keys.get("embedding_length_per_layer_input", 0))
    roles = (*spec.layer_tensors, *spec.dense_tensors, *spec.dense_recurrent_tensors)
    is_packed = spec.block.ffn != "plain" and all(r.target != "ffn_gate.weight" for r in roles)
    rows = {
        "attn_q": spec.q_rows,
        "attn_k": spec.kv_width,
        "attn_v": spec.kv_width,
        "attn_qkv": spec.q_width + 2 * spec.kv_width,
        "ffn_gate": n_ff,
        "ffn_up": 2 * n_ff if is_packed else n_ff,
        "token_embd": spec.n_vocab,
        "output": spec.n_vocab,
        "position_embd": spec.n_ctx,
        "attn_q_norm": spec.q_width if spec.whole_norms else spec.head_dim,
        "attn_k_norm": spec.kv_width if spec.whole_norms else spec.head_dim,
        "attn_gate": spec.n_head,
        "attn_sinks": spec.n_head,
        "layer_output_scale": 1,
        "inp_gate": brought,
        "per_layer_token_embd": spec.n_vocab,
        "per_layer_model_proj": brought * spec.n_layer,
        "per_layer_proj_norm": brought,
    }.get(stem, spec.n_embd)
    if leaf == "bias" or "norm" in stem or stem in ("attn_sinks", "layer_output_scale"):
        return (rows,)
    columns = {"attn_output": spec.q_width, "ffn_down": n_ff, "proj": brought}
    columns["per_layer_token_embd"] = brought * spec.n_layer
    return (rows, columns.get(stem, spec.n_embd))


def _shared_width(spec: ModelSpec) -> int:
    """Width of the FFN of the expert that every token passes."""
    name = "expert_shared_feed_forward_length"
    if name in spec.keys:
        return int(spec.keys[name])
    return int(spec.keys["expert_shared_count"]) * int(spec.keys["expert_feed_forward_length"])


def _expert_shape(spec: ModelSpec, stem: str, leaf: str) -> tuple[int, ...]:
    n_expert, n_ff = int(spec.keys["expert_count"]), int(spec.keys["expert_feed_forward_length"])
    if stem == "exp_probs_b":
        return (n_expert,)
    if leaf == "scale":
        return (spec.n_embd if stem == "ffn_gate_inp" else n_expert,)
    if stem == "ffn_gate_inp":
        return (n_expert, spec.n_embd)[: 2 if leaf == "weight" else 1]
    rows, columns = (spec.n_embd_expert, n_ff) if stem == "ffn_down_exps" else (n_ff, spec.n_embd_expert)
    rows *= 2 if stem == "ffn_gate_up_exps" else 1
    return (n_expert, rows, columns)[: 3 if leaf == "weight" else 2]
