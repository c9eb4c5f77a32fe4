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
from .. import llama, require, routed, warn_of_readers

ARCHITECTURE = "deepseek2"
STOCK_KEYS = (*routed.STOCK_KEYS, "expert_group_count")
_SHARED = 256  # experts that a reader takes
_FIELDS = {
    "n_expert": "n_routed_experts",
    "n_used": "num_experts_per_tok",
    "width": "moe_intermediate_size",
    "is_normed": "norm_topk_prob",
    "scale": "routed_scaling_factor",
}


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config with scoring_func softmax or sigmoid and first_k_dense_replace."""
    for name in ("attention_bias", "mlp_bias"):
        require(config, name, False, False, None)
    require(config, "rope_interleave", True, True)
    mla = _sizes(config)
    whole = {"rope_scaling": None, "rope_parameters": None, "head_dim": mla.kv_rank, "num_key_value_heads": 1}
    spec = llama.model_spec({"rms_norm_eps": 1e-6, **config, **whole})
    positions = rope.describe(config, mla.n_rot)
    ffn = tuple(role for role in spec.layer_tensors if role.target.startswith("ffn_"))
    spec = replace(
        spec,
        gguf_arch=ARCHITECTURE,
        mla=mla,
        n_rot=mla.n_rot,
        projections={},
        layer_tensors=(*_attention(mla, spec.n_head), *ffn),
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
            # of a model without experts, for stock readers
            "leading_dense_block_count": spec.n_layer,
            "expert_feed_forward_length": spec.keys["feed_forward_length"],
            "expert_shared_count": 0,
        },
        extra_tensors=positions.tensors,
        latentkv_keys=positions.latentkv_keys,
    )
    spec = _scaled(spec, mla, rope.parameters(config))
    n_dense = _dense_layers(config, spec.n_layer)
    return spec if n_dense == spec.n_layer else _with_experts(spec, config, n_dense)


def _sizes(config: Mapping[str, Any]) -> Mla:
    """Raises:
    ConvertError: sizes that no reader follows.
    """
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    sizes = [int(limits.number("config.json", name, config[name], 1, 4096)) for name in names]
    q_rank = int(limits.number("config.json", "q_lora_rank", config.get("q_lora_rank") or 0, 0, 1 << 16))
    kv_rank, n_rot, n_key, n_value = sizes
    return Mla(kv_rank, n_rot, n_key, n_value, q_rank)


def _dense_layers(config: Mapping[str, Any], n_layer: int) -> int:
    """First layers without experts."""
    first = int(config.get("first_k_dense_replace") or 0)
    kinds = config.get("mlp_layer_types") or ["dense"] * first + ["sparse"] * (n_layer - first)
    return routed.dense_layers(kinds) if config.get("n_routed_experts") else n_layer


def _attention(mla: Mla, n_head: int) -> tuple[TensorRole, ...]:
    own = "self_attn"
    cut = partial(_cut, n_head, mla.n_key)
    queries: tuple[TensorRole, ...]
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


def _with_experts(spec: ModelSpec, config: Mapping[str, Any], n_dense: int) -> ModelSpec:
    require(config, "scoring_func", None, *routed.GATING)
    scores, is_sigmoid = str(config["scoring_func"]), config["scoring_func"] == "sigmoid"
    given = config.get("n_shared_experts") or 0
    n_shared = int(limits.number("config.json", "n_shared_experts", given, 0, _SHARED))
    experts = routed.of_config(config, _FIELDS, shared=0, scores=scores, n_dense=n_dense)
    names = routed.Names() if is_sigmoid else routed.Names(bias="")
    spec = routed.with_experts(spec, replace(experts, shared=n_shared * experts.width), names)
    keys = {**spec.keys, "expert_shared_count": n_shared, **routed.groups(config, experts)}
    keys.pop("expert_shared_feed_forward_length", None)  # which stock readers count
    return replace(spec, keys=keys)


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
    scores = routed.gating_of(stock, "sigmoid" if has_bias else "softmax")
    if has_bias != (scores == "sigmoid"):
        raise ConvertError(stock.where, "exp_probs_b beside sigmoid scores, and there alone", scores)
    return {
        **config,
        "n_routed_experts": stock.whole("expert_count", 2, 4096),
        "num_experts_per_tok": stock.whole("expert_used_count", 1, 4096),
        "moe_intermediate_size": n_ff,
        "n_shared_experts": stock.whole("expert_shared_count", 0, _SHARED, 0),
        "scoring_func": scores,
        "norm_topk_prob": bool(stock.values.get("expert_weights_norm", False)),
        "routed_scaling_factor": stock.number("expert_weights_scale", 0, 1e6, 1.0) or 1.0,
        **routed.groups_of_stock(stock),
    }
