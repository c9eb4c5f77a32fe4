"""nemotron_h: Nemotron-H, Nemotron Nano 2.

A layer is one branch: Mamba-2, attention without RoPE, or an FFN with squared ReLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .... import limits
from ....errors import ConvertError
from ....ir import BlockSpec, ModelSpec, Projection, TensorRole
from ...stock import Stock
from .. import expert_keys, require, tables
from . import ATTENDS, RECURRENT, config_sizes, kv_heads, recurrent, sizes_of

FEEDS = ("mlp", "moe")
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_SIZES = {
    "heads": "mamba_num_heads",
    "width": "mamba_head_dim",
    "state": "ssm_state_size",
    "groups": "n_groups",
    "kernel": "conv_kernel",
}
_SIGMOID = 2  # llama.cpp's number of it


def kinds_of(config: Mapping[str, Any]) -> list[str]:
    """Kinds of layers, of a list or a string of letters.

    Raises:
        ConvertError: others, or none that attends.
    """
    given = config.get("layers_block_type") or config.get("layer_types")
    if given is None:
        letters = str(config.get("hybrid_override_pattern", ""))
        given = [_LETTERS.get(letter, letter) for letter in letters]
    kinds = list(given)
    for kind in kinds:
        require({"layers_block_type": kind}, "layers_block_type", None, *RECURRENT, *ATTENDS, *FEEDS)
    if not any(kind in ATTENDS for kind in kinds):
        raise ConvertError("config.json", "a layer that attends, whose K and V are cached", "none")
    return kinds


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    for name in ("attention_bias", "mlp_bias", "mamba_proj_bias", "use_bias"):
        require(config, name, False, False)
    require(config, "mlp_hidden_act", "relu2", "relu2")
    require(config, "sliding_window", None, None)
    kinds = kinds_of(config)
    if "mlp" in kinds and "moe" in kinds:
        raise ConvertError("config.json", "FFNs with experts in all layers or in none", "both")
    n_head, n_embd = int(config["num_attention_heads"]), int(config["hidden_size"])
    n_kv = int(config.get("num_key_value_heads") or n_head)
    head_dim, has_experts = int(config.get("head_dim") or 128), "moe" in kinds
    sizes = config_sizes(config, _SIZES)
    norm = TensorRole("norm.weight", "attn_norm.weight", "vector")
    mixer = recurrent("mixer", sizes, bool(config.get("use_conv_bias", True)))
    n_ff = int(config["moe_intermediate_size" if has_experts else "intermediate_size"])
    mixers = {**dict.fromkeys(RECURRENT, "mamba2"), **dict.fromkeys(ATTENDS, "attention")}
    return ModelSpec(
        gguf_arch="nemotron_h_moe" if has_experts else "nemotron_h",
        n_layer=len(kinds),
        n_embd=n_embd,
        n_head=n_head,
        n_kv=n_kv,
        head_dim=head_dim,
        n_rot=0,
        n_vocab=int(config["vocab_size"]),
        n_ctx=int(config["max_position_embeddings"]),
        block=BlockSpec(
            norm="rms",
            activation="relu2",
            ffn="plain_experts" if has_experts else "plain",
            parallel=False,
            position="none",
            rope_pairing="norm",
            expert_norm=bool(config.get("norm_topk_prob", True)) or not has_experts,
            mixers=tuple(mixers.get(kind, "none") for kind in kinds),
        ),
        layers="backbone.layers",
        projections={side: Projection(f"mixer.{side}_proj") for side in "qkv"},
        global_tensors=tuple(tables(config, "backbone.embeddings", "backbone.norm_f", tied=False)),
        layer_tensors=(
            norm,
            TensorRole("mixer.q_proj.weight", "attn_q.weight"),
            TensorRole("mixer.o_proj.weight", "attn_output.weight"),
        ),
        recurrent_tensors=(norm, *mixer),
        fed_tensors=(norm, *(_experts(config) if has_experts else _ffn())),
        keys={
            "feed_forward_length": [n_ff * (kind in FEEDS) for kind in kinds],
            "attention.head_count_kv": [n_kv * (kind in ATTENDS) for kind in kinds],
            "attention.key_length": head_dim,
            "attention.value_length": head_dim,
            "attention.layer_norm_rms_epsilon": float(config.get("layer_norm_epsilon", 1e-5)),
            "attention.layer_norm_epsilon": 1e-5,  # of further tokens' norm, which llama.cpp asks for
            "vocab_size": int(config["vocab_size"]),
            **sizes.keys,
            **(_expert_keys(config, n_ff) if has_experts else {}),
        },
    )


def _ffn() -> tuple[TensorRole, ...]:
    return tuple(TensorRole(f"mixer.{name}_proj.weight", f"ffn_{name}.weight") for name in ("up", "down"))


def _latent_size(config: Mapping[str, Any]) -> int:
    """Of what experts read and write, where that is not the hidden state; else 0."""
    return int(
        limits.number("config.json", "moe_latent_size", config.get("moe_latent_size") or 0, 0, 1 << 20)
    )


def _experts(config: Mapping[str, Any]) -> tuple[TensorRole, ...]:
    n_expert = int(config["n_routed_experts"])
    names = ("up", "down")
    around = (("fc1", "down"), ("fc2", "up")) if _latent_size(config) else ()
    return (
        *(TensorRole(f"mixer.{name}_latent_proj.weight", f"ffn_latent_{to}.weight") for name, to in around),
        TensorRole("mixer.gate.weight", "ffn_gate_inp.weight", "vector"),
        TensorRole("mixer.gate.e_score_correction_bias", "exp_probs_b.bias", "vector"),
        *(
            TensorRole(f"mixer.experts.{{}}.{name}_proj.weight", f"ffn_{name}_exps.weight", n_expert=n_expert)
            for name in names
        ),
        *(
            TensorRole(f"mixer.shared_experts.{name}_proj.weight", f"ffn_{name}_shexp.weight")
            for name in names
        ),
    )


def _expert_keys(config: Mapping[str, Any], n_ff: int) -> dict[str, Any]:
    n_shared = int(config.get("n_shared_experts", 1))
    require({"n_shared_experts": n_shared}, "n_shared_experts", 1, 1)
    return {
        **expert_keys(int(config["n_routed_experts"]), int(config["num_experts_per_tok"]), n_ff),
        "expert_shared_feed_forward_length": int(config["moe_shared_expert_intermediate_size"]),
        "expert_shared_count": n_shared,
        **({"moe_latent_size": _latent_size(config)} if _latent_size(config) else {}),
        "expert_gating_func": _SIGMOID,
        "expert_weights_norm": bool(config.get("norm_topk_prob", True)),
        "expert_weights_scale": float(config.get("routed_scaling_factor", 1.0)),
        "expert_group_count": int(config.get("n_group", 1)),
        "expert_group_used_count": int(config.get("topk_group", 1)),
    }


def config_of(stock: Stock) -> dict[str, Any]:
    """config.json, as far as the file's tensors depend on it."""
    n_layer = stock.n_layer()
    counts = kv_heads(stock, n_layer)
    attends = next(layer for layer, n in enumerate(counts) if n)
    widths = stock.values.get("feed_forward_length")
    widths = widths if isinstance(widths, list) else [widths] * n_layer
    if len(widths) < n_layer or not all(isinstance(n, int) for n in widths):
        expected = f"{n_layer} values of feed_forward_length, one a layer"
        raise ConvertError(stock.where, expected, str(widths)[:40])
    stock.values["feed_forward_length"] = width = max(widths)
    sizes, mamba = stock.of_layer(attends, False).sizes(), sizes_of(stock)
    n_expert = stock.whole("expert_count", 0, 4096, 0)
    stock.values["feed_forward_length"] = widths
    feeds = "moe" if n_expert else "mlp"
    kinds = [
        "full_attention" if n else feeds if wide else "linear_attention"
        for n, wide in zip(counts, widths, strict=False)
    ]
    return {
        **sizes,
        **{field: getattr(mamba, name) for name, field in _SIZES.items()},
        "intermediate_size": width,
        "layers_block_type": kinds,
        "layer_norm_epsilon": stock.number("attention.layer_norm_rms_epsilon", 0, 1),
        **(_expert_config(stock, n_expert, width) if n_expert else {}),
    }


def _expert_config(stock: Stock, n_expert: int, width: int) -> dict[str, Any]:
    n_ff = stock.whole("expert_feed_forward_length", 1, 1 << 22, width)
    return {
        "n_routed_experts": n_expert,
        "num_experts_per_tok": stock.whole("expert_used_count", 1, 4096),
        "moe_intermediate_size": n_ff,
        "moe_latent_size": stock.whole("moe_latent_size", 0, 1 << 20, 0),
        "moe_shared_expert_intermediate_size": stock.whole(
            "expert_shared_feed_forward_length", 1, 1 << 22, n_ff
        ),
        "n_shared_experts": stock.whole("expert_shared_count", 0, 256, 1),
        "norm_topk_prob": bool(stock.values.get("expert_weights_norm", False)),
        "routed_scaling_factor": stock.number("expert_weights_scale", 0, 1e6, 1.0) or 1.0,
        "n_group": stock.whole("expert_group_count", 0, 4096, 1) or 1,
        "topk_group": stock.whole("expert_group_used_count", 0, 4096, 1) or 1,
    }
