"""Layers with multi-head latent attention and experts, as DeepSeek V3 and GLM-4.7-Flash have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np

from .random_rows import Side
from .random_shapes import Mla, Shape

if TYPE_CHECKING:
    from .random_model import Tensors

N_DENSE = 1  # first layers without experts


def add_sizes(out: gguf.GGUFWriter, shape: Shape, mla: Mla) -> None:
    of = f"{shape.architecture}."
    numbers = {
        "attention.q_lora_rank": mla.q_rank,
        "attention.kv_lora_rank": mla.kv_rank,
        "attention.key_length": mla.row,
        "attention.value_length": mla.kv_rank,
        "attention.key_length_mla": mla.n_key + mla.n_rot,
        "attention.value_length_mla": mla.n_value,
        "attention.head_count_kv": 1,
        "rope.dimension_count": mla.n_rot,
        "leading_dense_block_count": N_DENSE,
        "expert_count": mla.n_expert,
        "expert_used_count": mla.n_used,
        "expert_shared_count": mla.n_shared,
        "expert_feed_forward_length": mla.n_ff,
        "expert_gating_func": 2,  # sigmoid
    }
    for name, n in numbers.items():
        out.add_uint32(of + name, n)
    out.add_float32(of + "expert_weights_scale", 1.8)
    out.add_bool(of + "expert_weights_norm", True)


def add_cache(out: gguf.GGUFWriter, shape: Shape, row: Side) -> None:
    """Rows of V, which keys are too."""
    n = shape.n_layer
    for letter, path in (("k", "value"), ("v", "latent")):
        out.add_array(f"latentkv.{letter}.path", [path] * n)
        out.add_array(f"latentkv.{letter}.group", [1] * n)
    out.add_array("latentkv.v.ranks", [row.rank] * n)
    out.add_array("latentkv.v.segment_counts", [len(row.segments)] * n)
    out.add_array("latentkv.v.segment_widths", [width for _, width in row.segments] * n)
    out.add_array("latentkv.v.segment_formats", [name for name, _ in row.segments] * n)


def add_layer(add: Tensors, layer: int, mla: Mla, row: Side) -> None:
    shape, blk = add.shape, f"blk.{layer}."
    for name in ("attn_norm", "ffn_norm"):
        add.constant(blk + f"{name}.weight", shape.n_embd)
    queries = shape.n_head * (mla.n_key + mla.n_rot)
    if mla.q_rank:
        add.weight(blk + "attn_q_a.weight", mla.q_rank, shape.n_embd)
        add.constant(blk + "attn_q_a_norm.weight", mla.q_rank)
        add.weight(blk + "attn_q_b.weight", queries, mla.q_rank)
    else:
        add.weight(blk + "attn_q.weight", queries, shape.n_embd)
    add.weight(blk + "attn_kv_a_mqa.weight", mla.row, shape.n_embd)
    add.constant(blk + "attn_kv_a_norm.weight", mla.kv_rank)
    rank = mla.kv_rank
    if row.path == "latent":
        rank = row.rank - mla.n_rot
        add.factor(blk + "attn_v_e.weight", rank, mla.kv_rank)
    add.weights_of(blk + "attn_k_b.weight", shape.n_head, rank, mla.n_key)
    add.weights_of(blk + "attn_v_b.weight", shape.n_head, mla.n_value, rank)
    add.weight(blk + "attn_output.weight", shape.n_embd, shape.n_head * mla.n_value)
    if layer < N_DENSE:
        _add_ffn(add, blk, "", shape.n_ff)
        return
    router = add.weights.f16(mla.n_expert, shape.n_embd, scale=0.02).astype(np.float32)
    add.out.add_tensor(blk + "ffn_gate_inp.weight", router)
    add.constant(blk + "exp_probs_b.bias", mla.n_expert, 0.0)
    _add_ffn(add, blk, "_shexp", mla.n_shared * mla.n_ff)
    for name, n_out, n_in in _products(shape, mla.n_ff):
        add.weights_of(f"{blk}{name}_exps.weight", mla.n_expert, n_out, n_in)


def _products(shape: Shape, n_ff: int) -> list[tuple[str, int, int]]:
    down = ("ffn_down", shape.n_embd, n_ff)
    return [("ffn_gate", n_ff, shape.n_embd), ("ffn_up", n_ff, shape.n_embd), down]


def _add_ffn(add: Tensors, blk: str, of: str, n_ff: int) -> None:
    for name, n_out, n_in in _products(add.shape, n_ff):
        add.weight(f"{blk}{name}{of}.weight", n_out, n_in)
