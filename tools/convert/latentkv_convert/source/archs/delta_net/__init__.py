"""Architectures of which most layers are gated delta nets (Yang et al. 2024, arXiv 2412.06464), and every
fourth attends: RoPE on a quarter of a head, norms on queries and keys, an output gate.

Tensors have the names and layouts of llama.cpp's converter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .... import limits
from ....errors import ConvertError
from ....ir import F32, ModelSpec, Projection, TensorRole
from ... import rope
from ...recurrent import DeltaNetSizes
from ...stock import Stock
from .. import expert_keys, from_zero, llama, require

RECURRENT, ATTENDS = "linear_attention", "full_attention"  # kinds of layers in config.json
PERIOD = 4  # of every so many layers the last attends
SECTIONS = [11, 11, 10, 0]  # planes of a picture's time, height and width: of text all have one position
_MROPE = ("mrope_section", "mrope_interleaved")


def sizes_of(config: Mapping[str, Any]) -> DeltaNetSizes:
    """Raises:
    ConvertError: heads that no reader follows.
    """
    n_k, n_v = int(config.get("linear_num_key_heads", 16)), int(config.get("linear_num_value_heads", 32))
    width = int(config.get("linear_key_head_dim", 128))
    require(config, "linear_value_head_dim", 128, width)
    kernel = int(config.get("linear_conv_kernel_dim", 4))
    for name, value in (("linear_num_key_heads", n_k), ("linear_key_head_dim", width)):
        if not 1 <= value <= 4096:
            raise ConvertError("config.json", f"{name} from 1 to 4096", str(value))
    if n_v < n_k or n_v % n_k or n_v > 4096:
        raise ConvertError("config.json", f"linear_num_value_heads a multiple of {n_k}", str(n_v))
    if not 2 <= kernel <= 64:
        raise ConvertError("config.json", "linear_conv_kernel_dim from 2 to 64", str(kernel))
    return DeltaNetSizes(n_k, n_v, width, kernel)


def norm(source: str, target: str) -> TensorRole:
    return TensorRole(f"{source}.weight", f"{target}.weight", "vector", transform=from_zero)


def _decay(log: F32) -> F32:
    return -np.exp(log)


def _kernels(weight: F32) -> F32:
    """[channels, 1, kernel] -> [channels, kernel]"""
    return weight[:, 0]


def _columns(order: NDArray[np.int64]) -> Callable[[F32], F32]:
    return lambda weight: weight[:, order]


def recurrent(
    sizes: DeltaNetSizes, projections: tuple[TensorRole, ...], order: NDArray[np.int64] | None
) -> tuple[TensorRole, ...]:
    """A delta net. projections: of its input. order: of value heads in the file, None: the checkpoint's."""
    heads = None if order is None else sizes.tiled(1)
    channels = None if order is None else sizes.behind_keys(order)
    return (
        *projections,
        TensorRole("linear_attn.conv1d.weight", "ssm_conv1d.weight", "vector", 0, channels, _kernels),
        TensorRole("linear_attn.dt_bias", "ssm_dt.bias", "vector", rows=heads),
        TensorRole("linear_attn.A_log", "ssm_a", "vector", 0, heads, _decay),
        TensorRole("linear_attn.norm.weight", "ssm_norm.weight", "vector"),
        TensorRole(
            "linear_attn.out_proj.weight",
            "ssm_out.weight",
            transform=None if order is None else _columns(order),
        ),
    )


def model_spec(
    config: Mapping[str, Any], gguf_arch: str, projections: Callable[[DeltaNetSizes], tuple[TensorRole, ...]]
) -> ModelSpec:
    """The dense model. projections: of a delta net's input."""
    for name in ("attention_bias", "mlp_bias"):
        require(config, name, False, False, None)
    require(config, "attn_output_gate", True, True)
    require(config, "hidden_act", "silu", "silu")
    given = rope.parameters({**config, **_without_sections(config)})
    share = float(given.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.25)))
    head_dim = int(config.get("head_dim") or 256)
    whole = {"rope_scaling": None, "rope_parameters": None, "attention_bias": False, "head_dim": head_dim}
    spec = llama.model_spec({"rms_norm_eps": 1e-6, **config, **whole})
    sizes, kinds = sizes_of(config), layer_kinds(config, spec.n_layer)
    turned = {**config, "rope_scaling": None, "rope_parameters": given}
    spec = llama.partly_rotated(spec, turned, share, int(head_dim * share))
    ffn = tuple(
        role for role in spec.layer_tensors if role.target.startswith("ffn_") and role.kind == "weight"
    )
    both = (
        norm("input_layernorm", "attn_norm"),
        norm("post_attention_layernorm", "post_attention_norm"),
        *ffn,
    )
    tables = tuple(
        norm("model.norm", "output_norm") if role.kind == "vector" else role for role in spec.global_tensors
    )
    made = projections(sizes)
    order = None if any(role.target == "ssm_ba.weight" for role in made) else sizes.tiled(sizes.width)
    return replace(
        spec,
        gguf_arch=gguf_arch,
        block=replace(
            spec.block,
            rope_pairing="neox",
            output_gate=True,
            mixers=tuple("attention" if kind == ATTENDS else "delta_net" for kind in kinds),
        ),
        projections={side: Projection(f"self_attn.{side}_proj") for side in "qkv"},
        global_tensors=tables,
        layer_tensors=(
            TensorRole("self_attn.q_proj.weight", "attn_q.weight"),
            TensorRole("self_attn.o_proj.weight", "attn_output.weight"),
            norm("self_attn.q_norm", "attn_q_norm"),
            norm("self_attn.k_norm", "attn_k_norm"),
            *both,
        ),
        recurrent_tensors=(*recurrent(sizes, made, order), *both),
        keys={**spec.keys, **sizes.keys, **pattern_keys(kinds)},
    )


def _without_sections(config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE's parameters without those of pictures."""
    found = {}
    for name in ("rope_scaling", "rope_parameters"):
        given = config.get(name)
        if isinstance(given, Mapping):
            found[name] = {key: value for key, value in given.items() if key not in _MROPE}
    return found


def section_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """How RoPE's planes are shared by the positions of a picture, for stock readers, who ask for it."""
    given: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    sections = given.get("mrope_section", SECTIONS)
    if not isinstance(sections, list) or not all(isinstance(n, int) and n >= 0 for n in sections):
        raise ConvertError("config.json", "mrope_section as a list of whole numbers", str(sections)[:40])
    return {"rope.dimension_sections": [*sections, 0, 0, 0, 0][:4]}


def layer_kinds(config: Mapping[str, Any], n_layer: int) -> list[str]:
    """Raises:
    ConvertError: kinds of other models, another number of them, or no layer that attends.
    """
    period = int(limits.number("config.json", "full_attention_interval", _interval(config), 1, 4096))
    usual = [ATTENDS if (layer + 1) % period == 0 else RECURRENT for layer in range(n_layer)]
    kinds = list(config.get("layer_types") or usual)
    for kind in kinds:
        require({"layer_types": kind}, "layer_types", None, RECURRENT, ATTENDS)
    if len(kinds) != n_layer:
        raise ConvertError("config.json", f"{n_layer} layer_types, one a layer", str(len(kinds)))
    if ATTENDS not in kinds:
        raise ConvertError("config.json", "a layer that attends, whose K and V are cached", "none")
    return kinds


def _interval(config: Mapping[str, Any]) -> Any:
    return config.get("full_attention_interval") or PERIOD


def pattern_keys(kinds: list[str]) -> dict[str, Any]:
    """Which layers attend, for stock readers: every n-th, or a list of them."""
    for period in (PERIOD, *range(1, len(kinds) + 1)):
        if all((kind == ATTENDS) == ((layer + 1) % period == 0) for layer, kind in enumerate(kinds)):
            return {"full_attention_interval": period}
    return {"attention.recurrent_layers": [kind == RECURRENT for kind in kinds]}


def with_experts(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    """With experts in every layer, and one that every token reads through a gate."""
    require(config, "norm_topk_prob", True, True)
    require(config, "decoder_sparse_step", 1, 1)
    require(config, "mlp_only_layers", None, None, [])
    n_expert, n_used = int(config.get("num_experts", 256)), int(config.get("num_experts_per_tok", 8))
    n_ff = int(config.get("moe_intermediate_size", 512))
    n_shared = int(config.get("shared_expert_intermediate_size", 512))
    limits.number("config.json", "shared_expert_intermediate_size", n_shared, 1, 1 << 22)
    shared = "mlp.shared_expert"
    ffn = (
        TensorRole("mlp.gate.weight", "ffn_gate_inp.weight", "vector"),
        *_experts(n_expert, n_ff),
        TensorRole(f"{shared}_gate.weight", "ffn_gate_inp_shexp.weight", "vector"),
        *(TensorRole(f"{shared}.{name}_proj.weight", f"ffn_{name}_shexp.weight") for name in _MAPS),
    )

    def fed(roles: tuple[TensorRole, ...]) -> tuple[TensorRole, ...]:
        return (*(role for role in roles if not role.target.startswith("ffn_")), *ffn)

    return replace(
        spec,
        block=replace(spec.block, ffn="experts"),
        layer_tensors=fed(spec.layer_tensors),
        recurrent_tensors=fed(spec.recurrent_tensors),
        keys={
            **spec.keys,
            **expert_keys(n_expert, n_used, n_ff),
            "expert_shared_feed_forward_length": n_shared,
        },
    )


_MAPS = ("gate", "up", "down")


def _experts(n_expert: int, n_ff: int) -> list[TensorRole]:
    """A checkpoint has every expert by itself, or [n_expert, 2 n_ff, n_embd] with gates before ups and
    [n_expert, n_embd, n_ff]."""
    cuts: dict[str, tuple[str, Callable[[F32], F32] | None]] = {
        "gate": ("gate_up", lambda both: both[:, :n_ff]),
        "up": ("gate_up", lambda both: both[:, n_ff:]),
        "down": ("down", None),
    }
    roles = []
    for name, (packed, cut) in cuts.items():
        target, source = f"ffn_{name}_exps.weight", f"mlp.experts.{{}}.{name}_proj.weight"
        stacked = TensorRole(f"mlp.experts.{packed}_proj", target, transform=cut)
        roles.append(TensorRole(source, target, n_expert=n_expert, otherwise=stacked))
    return roles


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    sizes = stock.sizes()
    n_layer, n_v = sizes["num_hidden_layers"], stock.whole("ssm.time_step_rank", 1, 4096)
    width = stock.whole("ssm.state_size", 1, 4096)
    inner = stock.whole("ssm.inner_size", 1, 1 << 24)
    if inner != n_v * width:
        expected = f"ssm.inner_size {n_v * width}, {n_v} heads of {width} (ssm.state_size)"
        raise ConvertError(stock.where, expected, str(inner))
    return {
        **sizes,
        "rms_norm_eps": stock.number("attention.layer_norm_rms_epsilon", 0, 1),
        "partial_rotary_factor": stock.whole("rope.dimension_count", 2, 4096) / sizes["head_dim"],
        "linear_num_key_heads": stock.whole("ssm.group_count", 1, 4096),
        "linear_num_value_heads": n_v,
        "linear_key_head_dim": width,
        "linear_value_head_dim": width,
        "linear_conv_kernel_dim": stock.whole("ssm.conv_kernel", 2, 64),
        "layer_types": _stock_kinds(stock, n_layer),
    }


def _stock_kinds(stock: Stock, n_layer: int) -> list[str]:
    """Mixers of the trunk's layers; the stock list also has blocks after the trunk."""
    listed = stock.values.get("attention.recurrent_layers")
    if listed is None:
        period = stock.whole("full_attention_interval", 0, 4096, PERIOD) or n_layer + 1
        listed = [(layer + 1) % period != 0 for layer in range(n_layer)]
    elif not isinstance(listed, list) or len(listed) < n_layer:
        got = str(len(listed)) if isinstance(listed, list) else str(listed)[:40]
        raise ConvertError(stock.where, f"{n_layer} values of attention.recurrent_layers, one a layer", got)
    return [RECURRENT if recurs else ATTENDS for recurs in listed[:n_layer]]


def expert_config_of(stock: Stock) -> dict[str, Any]:
    """What a file with experts has in addition."""
    n_used = stock.whole("expert_used_count", 1, 4096)
    n_ff = stock.whole("expert_feed_forward_length", 1, 1 << 22)
    return {
        "num_experts": stock.whole("expert_count", 2, 4096),
        "num_experts_per_tok": n_used,
        "moe_intermediate_size": n_ff,
        "shared_expert_intermediate_size": stock.whole("expert_shared_feed_forward_length", 1, 1 << 22, n_ff),
    }
