"""Architectures with multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): a token's row is a latent,
of which every head makes its keys and values, and a few turned channels of the key that all heads share.

Tensors have the names and layouts of llama.cpp's converter: kv_b_proj becomes attn_k_b, transposed, and
attn_v_b.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from .... import limits
from ....errors import ConvertError
from ....ir import F32, Mla, ModelSpec, TensorRole
from ... import rope
from ...stock import Stock
from .. import expert_keys, llama, require, warn_of_readers

ARCHITECTURE = "deepseek2"
TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "n_group": 1,
    "topk_group": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_GATING = {"softmax": 1, "sigmoid": 2}  # llama.cpp's numbers
_EXPERTS = 256  # groups and shared experts that a reader takes


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    """Of a config with scoring_func softmax or sigmoid and first_k_dense_replace."""
    for name in ("attention_bias", "mlp_bias"):
        require(config, name, False, False, None)
    require(config, "rope_interleave", True, True)
    mla = _sizes(config)
    whole = {"rope_scaling": None, "rope_parameters": None, "head_dim": mla.kv_rank, "num_key_value_heads": 1}
    spec = llama.model_spec({"rms_norm_eps": 1e-6, **config, **whole})
    positions = rope.describe(config, mla.n_rot)
    n_dense = _dense_layers(config, spec.n_layer)
    dense = tuple(role for role in spec.layer_tensors if role.target.startswith("ffn_"))
    ours = (*(role for role in dense if role.kind == "vector"), *_attention(config, mla, spec.n_head))
    maps = tuple(role for role in dense if role.kind == "weight")
    routed = _routed(config) if n_dense < spec.n_layer else {}
    spec = replace(
        spec,
        gguf_arch=ARCHITECTURE,
        mla=mla,
        n_rot=mla.n_rot,
        block=replace(
            spec.block,
            ffn="experts" if routed else "gated",
            expert_norm=bool(config.get("norm_topk_prob")) if routed else True,
        ),
        projections={},
        layer_tensors=(*ours, *(_expert_tensors(config) if routed else maps)),
        dense_tensors=(*ours, *maps) if routed else (),
        keys={
            **spec.keys,
            **positions.keys,
            **_yarn(config, positions.keys),
            "attention.key_length": mla.row,
            "attention.value_length": mla.kv_rank,
            "attention.key_length_mla": mla.query,
            "attention.value_length_mla": mla.n_value,
            "attention.kv_lora_rank": mla.kv_rank,
            "attention.q_lora_rank": mla.q_rank,
            "leading_dense_block_count": n_dense,
            "expert_shared_count": 0,
            **({} if routed else {"expert_feed_forward_length": spec.keys["feed_forward_length"]}),
            **routed,
        },
        extra_tensors=positions.tensors,
        latentkv_keys=positions.latentkv_keys,
    )
    return _scaled(spec, mla, rope.parameters(config))


def _sizes(config: Mapping[str, Any]) -> Mla:
    """Raises:
    ConvertError: sizes that no reader follows.
    """
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    sizes = [int(limits.number("config.json", name, config[name], 1, 4096)) for name in names]
    q_rank = int(limits.number("config.json", "q_lora_rank", config.get("q_lora_rank") or 0, 0, 1 << 16))
    return Mla(*sizes, q_rank)


def _dense_layers(config: Mapping[str, Any], n_layer: int) -> int:
    """First layers without experts."""
    first = int(config.get("first_k_dense_replace") or 0)
    kinds = config.get("mlp_layer_types") or ["dense"] * first + ["sparse"] * (n_layer - first)
    n_dense = list(kinds).count("dense")
    if list(kinds) != ["dense"] * n_dense + ["sparse"] * (n_layer - n_dense):
        raise ConvertError("config.json", "layers without experts before all that have them", "others")
    return n_dense if config.get("n_routed_experts") else n_layer


def _attention(config: Mapping[str, Any], mla: Mla, n_head: int) -> tuple[TensorRole, ...]:
    own = "self_attn"
    cut = partial(_cut, n_head, mla.n_key)
    if mla.q_rank:
        queries = (
            TensorRole(f"{own}.q_a_proj.weight", "attn_q_a.weight"),
            TensorRole(f"{own}.q_a_layernorm.weight", "attn_q_a_norm.weight", "vector"),
            TensorRole(f"{own}.q_b_proj.weight", "attn_q_b.weight"),
        )
    else:
        queries = (TensorRole(f"{own}.q_proj.weight", "attn_q.weight"),)
    return (
        TensorRole("input_layernorm.weight", "attn_norm.weight", "vector"),
        *queries,
        TensorRole(f"{own}.kv_a_proj_with_mqa.weight", "attn_kv_a_mqa.weight"),
        TensorRole(f"{own}.kv_a_layernorm.weight", "attn_kv_a_norm.weight", "vector"),
        TensorRole(f"{own}.kv_b_proj.weight", "attn_k_b.weight", transform=partial(cut, False)),
        TensorRole(f"{own}.kv_b_proj.weight", "attn_v_b.weight", transform=partial(cut, True)),
        TensorRole(f"{own}.o_proj.weight", "attn_output.weight"),
    )


def _cut(n_head: int, n_key: int, value_side: bool, both: F32) -> F32:
    """kv_b_proj [n_head·(n_key + n_value), kv_rank] -> keys [n_head, kv_rank, n_key] or values [n_head,
    n_value, kv_rank]."""
    heads = both.reshape(n_head, -1, both.shape[-1])
    return heads[:, n_key:] if value_side else heads[:, :n_key].transpose(0, 2, 1)


def _routed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Stock keys of experts and of how they are chosen."""
    names = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
    limits.check_config({"num_experts": config[names[0]], names[1]: config[names[1]]})
    n_expert, n_used, n_ff = (int(config[name]) for name in names)
    require(config, "scoring_func", None, *_GATING)
    scores, method = str(config["scoring_func"]), config.get("topk_method")
    n_shared = int(
        limits.number("config.json", "n_shared_experts", config.get("n_shared_experts") or 0, 0, _EXPERTS)
    )
    keys = {
        **expert_keys(n_expert, n_used, n_ff),
        "expert_shared_count": n_shared,
        "expert_gating_func": _GATING[scores],
        "expert_weights_norm": bool(config.get("norm_topk_prob")),
        "expert_weights_scale": float(config.get("routed_scaling_factor") or 1.0),
    }
    n_groups, n_chosen = (int(config.get(name) or 1) for name in ("n_group", "topk_group"))
    if method == "greedy" or n_groups == n_chosen:
        return keys
    if not 1 <= n_chosen < n_groups or n_expert % n_groups or n_expert < 2 * n_groups:
        wanted = f"n_group that divides {n_expert} experts, and a topk_group below it"
        raise ConvertError("config.json", wanted, f"{n_groups} and {n_chosen}")
    if scores == "softmax":
        warn_of_readers("groups of experts by the sum of their two best, for stock readers", "by their best")
    return {**keys, "expert_group_count": n_groups, "expert_group_used_count": n_chosen}


def _expert_tensors(config: Mapping[str, Any]) -> tuple[TensorRole, ...]:
    maps, n_expert = ("gate", "up", "down"), int(config["n_routed_experts"])
    roles = [TensorRole("mlp.gate.weight", "ffn_gate_inp.weight", "vector")]
    if config["scoring_func"] == "sigmoid":
        roles.append(TensorRole("mlp.gate.e_score_correction_bias", "exp_probs_b.bias", "vector"))
    for name in maps:
        source, target = f"mlp.experts.{{}}.{name}_proj.weight", f"ffn_{name}_exps.weight"
        roles.append(TensorRole(source, target, n_expert=n_expert))
    if config.get("n_shared_experts"):
        shared = "mlp.shared_experts"
        roles += [TensorRole(f"{shared}.{name}_proj.weight", f"ffn_{name}_shexp.weight") for name in maps]
    return tuple(roles)


def _yarn(config: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """With mscale_all_dim, YaRN's growth is the scores' alone, and stock readers of deepseek2 take a tenth of
    it (which is what they multiply a logarithm by)."""
    if keys.get("rope.scaling.type") != "yarn":
        return {}
    share = rope.parameters(config).get("mscale_all_dim")
    if not share:
        return {}
    stock = 0.1 * math.log(max(1.0, keys["rope.scaling.factor"])) + 1.0
    return {
        "rope.scaling.yarn_log_multiplier": 0.1 * limits.number("rope", "mscale_all_dim", share, 0, 1e3),
        "rope.scaling.attn_factor": keys.get("rope.scaling.attn_factor", 1.0) * stock,
    }


def _scaled(spec: ModelSpec, mla: Mla, parameters: Mapping[str, Any]) -> ModelSpec:
    """With transformers' scale of scores, where a reader would take another."""
    share, growth = float(parameters.get("mscale_all_dim") or 0), 1.0
    if spec.keys.get("rope.scaling.type") == "yarn":
        growth = 0.1 * share * math.log(max(1.0, spec.keys["rope.scaling.factor"])) + 1.0
    scale = growth * growth / math.sqrt(mla.query)
    if math.isclose(scale, mla.scale(spec.keys), rel_tol=1e-6):
        return spec
    warn_of_readers("scores that grow as YaRN's mscale_all_dim says, for stock readers of deepseek2")
    return replace(spec, block=replace(spec.block, attention_scale=scale))


def shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Role -> shape, of all tensors that a layer may have in place of Q, K and V; none without MLA."""
    mla = spec.mla
    if mla is None:
        return {}
    n_embd, queries = spec.n_embd, spec.n_head * mla.query
    return {
        "attn_q.weight": (queries, n_embd),
        "attn_q_a.weight": (mla.q_rank, n_embd),
        "attn_q_a_norm.weight": (mla.q_rank,),
        "attn_q_b.weight": (queries, mla.q_rank),
        "attn_kv_a_mqa.weight": (mla.row, n_embd),
        "attn_kv_a_norm.weight": (mla.kv_rank,),
        "attn_k_b.weight": (spec.n_head, mla.kv_rank, mla.n_key),
        "attn_v_b.weight": (spec.n_head, mla.n_value, mla.kv_rank),
        "attn_output.weight": (n_embd, spec.n_head * mla.n_value),
    }


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json of a GGUF, as far as the file's tensors depend on it."""
    where = "attention."
    if stock.has("attn_kv_b.weight"):
        older = "attn_kv_b, which older converters write"
        raise ConvertError(stock.where, "attn_k_b and attn_v_b in layers", older, "get a newer file")
    n_layer, n_rot = stock.n_layer(), stock.whole("rope.dimension_count", 2, 4096)
    n_dense = min(stock.whole("leading_dense_block_count", 0, 4096, 0), n_layer)
    n_ff, kv_rank = (
        stock.whole("expert_feed_forward_length", 1, 1 << 22),
        stock.whole(f"{where}kv_lora_rank", 1, 4096),
    )
    for name, n in (("key_length", kv_rank + n_rot), ("value_length", kv_rank), ("head_count_kv", 1)):
        stock.whole(f"{where}{name}", n, n, n)
    config = {
        "hidden_size": stock.whole("embedding_length", 1, 1 << 20),
        "num_hidden_layers": n_layer,
        "intermediate_size": stock.whole("feed_forward_length", 1, 1 << 22, n_ff),
        "num_attention_heads": stock.whole(f"{where}head_count", 1, 4096),
        "max_position_embeddings": stock.whole("context_length", 1, 1 << 30),
        "vocab_size": stock.n_vocab,
        "rope_theta": stock.number("rope.freq_base", *limits.ROPE_BASE, default=10000.0),
        "tie_word_embeddings": not stock.has("output.weight"),
        "rms_norm_eps": stock.number(f"{where}layer_norm_rms_epsilon", 0, 1),
        "kv_lora_rank": kv_rank,
        "q_lora_rank": stock.whole(f"{where}q_lora_rank", 0, 1 << 16, 0)
        if stock.has("attn_q_a.weight")
        else 0,
        "qk_rope_head_dim": n_rot,
        "qk_nope_head_dim": stock.whole(f"{where}key_length_mla", n_rot + 1, 8192) - n_rot,
        "v_head_dim": stock.whole(f"{where}value_length_mla", 1, 8192),
        "first_k_dense_replace": n_dense,
    }
    if not stock.values.get("expert_count"):
        return config
    has_bias = stock.has_in("exp_probs_b.bias", n_dense)
    gating = stock.whole("expert_gating_func", 0, 2, 0) or _GATING["sigmoid" if has_bias else "softmax"]
    scores = next(name for name, number in _GATING.items() if number == gating)
    if has_bias != (scores == "sigmoid"):
        raise ConvertError(stock.where, "exp_probs_b beside sigmoid scores, and there alone", scores)
    return {
        **config,
        "n_routed_experts": stock.whole("expert_count", 2, 4096),
        "num_experts_per_tok": stock.whole("expert_used_count", 1, 4096),
        "moe_intermediate_size": n_ff,
        "n_shared_experts": stock.whole("expert_shared_count", 0, _EXPERTS, 0),
        "scoring_func": scores,
        "norm_topk_prob": bool(stock.values.get("expert_weights_norm", False)),
        "routed_scaling_factor": stock.number("expert_weights_scale", 0, 1e6, 1.0) or 1.0,
        "n_group": stock.whole("expert_group_count", 0, 4096, 1),
        "topk_group": stock.whole("expert_group_used_count", 0, 4096, 1),
    }


STOCK_KEYS = (
    *("expert_count", "expert_used_count", "expert_shared_count", "expert_group_count", "expert_gating_func"),
    *("expert_weights_norm", "expert_weights_scale", "leading_dense_block_count"),
)
