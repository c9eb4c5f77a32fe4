"""Write a model of random weights in a known shape, its cache described as asked, to measure speed.

    python bench/inputs/random_model.py 8b out.gguf --cache rotated:64/latent:64
    python bench/inputs/random_model.py qwen38-27b out.gguf --plan 14  # rows as `convert` writes by default

The file has no tokenizer. Its logits mean nothing; its speed is that of a real file of the same shape.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/

from command import arguments
from inputs import random_mla
from inputs.fast_gguf import write_tensors
from inputs.random_rows import PLANS, PREFER, SCALES, Side, chosen_group, planned, sides_of
from inputs.random_shapes import SHAPES, DeltaNet, Heads, Shape
from inputs.random_weights import Weights

SINK, RECENT = 4, 128  # the planner's exact windows


def rope_freqs(shape: Shape) -> np.ndarray | None:
    """What each RoPE plane is slower by, [n_rot / 2]: of Llama-3.1's files, and of Gemma 4's layers without a
    window, three quarters of whose planes do not turn.

    Llama's: 1 for waves of up to 2048 positions, the factor from 8192 on, between them what lies between.
    """
    if shape.global_heads:
        planes = shape.global_heads.n_rot // 2
        return np.where(np.arange(planes) < planes // 4, 1.0, 1e30).astype(np.float32)
    if shape.rope_factor == 1:
        return None
    wave = 2 * np.pi * shape.rope_base ** (np.arange(0, shape.head_dim, 2) / shape.head_dim)
    smooth = np.clip((8192 / wave - 1) / 3, 0, 1)
    return (1 / (smooth + (1 - smooth) / shape.rope_factor)).astype(np.float32)


def add_sizes(out: gguf.GGUFWriter, shape: Shape) -> None:
    layers = [shape.heads(layer) for layer in range(shape.n_layer)]
    out.add_block_count(shape.n_layer)
    out.add_context_length(131072)
    out.add_embedding_length(shape.n_embd)
    out.add_feed_forward_length(shape.n_ff)
    out.add_head_count(shape.n_head)
    out.add_rope_freq_base(shape.rope_base)
    out.add_layer_norm_rms_eps(1e-6 if shape.period > 1 else 1e-5)
    out.add_vocab_size(shape.n_vocab)
    out.add_tokenizer_model("no_vocab")
    if net := shape.delta_net:
        out.add_full_attention_interval(shape.period)
        out.add_ssm_conv_kernel(net.conv_kernel)
        out.add_ssm_state_size(net.state_size)
        out.add_ssm_group_count(net.n_k)
        out.add_ssm_time_step_rank(net.n_v)
        out.add_ssm_inner_size(net.n_v * net.state_size)
        third = -(-shape.n_rot // 6)
        out.add_rope_dimension_sections([third, third, shape.n_rot // 2 - 2 * third, 0])
    if shape.mla:
        random_mla.add_sizes(out, shape, shape.mla)
        return
    if wide := shape.global_heads:
        out.add_sliding_window(1024)
        out.add_sliding_window_pattern([bool(heads and heads.window) for heads in layers])
        out.add_head_count_kv([heads.n_kv for heads in layers if heads])
        out.add_key_length_swa(shape.head_dim)
        out.add_value_length_swa(shape.head_dim)
        out.add_rope_dimension_count_swa(shape.head_dim)
        out.add_rope_freq_base_swa(10000.0)
        out.add_embedding_length_per_layer_input(0)
        out.add_shared_kv_layers(0)
        out.add_final_logit_softcapping(30.0)
    else:
        out.add_head_count_kv(shape.n_kv)
    head_dim = wide.head_dim if wide else shape.head_dim
    out.add_key_length(head_dim)
    out.add_value_length(head_dim)
    out.add_rope_dimension_count(wide.n_rot if wide else shape.n_rot or shape.head_dim)


def add_cache(out: gguf.GGUFWriter, shape: Shape, sides: tuple[Side, Side]) -> None:
    out.add_uint32("latentkv.version", 1)
    if shape.mla:
        random_mla.add_cache(out, shape, sides[1])
        out.add_uint32("latentkv.regions.sink", SINK)
        out.add_uint32("latentkv.regions.recent", RECENT)
        return
    for letter, side in zip("kv", sides, strict=True):
        heads = [shape.heads(layer) for layer in range(shape.n_layer)]
        layers = [side.of(each, shape) for each in heads]
        both = [(own, each) for own, each in zip(layers, heads, strict=True) if each and own.path != "value"]
        entries = [own for own, each in both for _ in range(each.n_kv // own.group)]  # one for every latent
        out.add_array(f"latentkv.{letter}.path", [own.path for own in layers])
        out.add_array(f"latentkv.{letter}.group", [own.group for own in layers])
        out.add_array(f"latentkv.{letter}.ranks", [own.rank for own in entries])
        if side.segments:
            segments = [segment for own in entries for segment in own.segments]
            out.add_array(f"latentkv.{letter}.segment_counts", [len(own.segments) for own in entries])
            out.add_array(f"latentkv.{letter}.segment_widths", [width for _, width in segments])
            out.add_array(f"latentkv.{letter}.segment_formats", [name for name, _ in segments])
    if sides[0].segments:
        out.add_uint32("latentkv.regions.sink", SINK)
        out.add_uint32("latentkv.regions.recent", RECENT)


class Tensors:
    """Adds tensors to a file; exact: in f32."""

    def __init__(self, out: gguf.GGUFWriter, shape: Shape, seed: int, exact: bool) -> None:
        self.out, self.shape, self.exact = out, shape, exact
        of_experts = shape.mla.n_expert * shape.mla.n_ff if shape.mla else 0
        largest = max(shape.n_vocab, shape.n_ff, 2 * shape.n_head * shape.head_dim, of_experts) * shape.n_embd
        self.weights = Weights(seed, shape.weights, largest)

    def weight(self, name: str, n_out: int, n_in: int) -> None:
        if self.exact:
            drawn = self.weights.f16(n_out, n_in, scale=1.0 / math.sqrt(n_in))
            self.out.add_tensor(name, drawn.astype(np.float32))
            return
        self.out.add_tensor(name, self.weights.quantized(n_out, n_in), raw_dtype=self.weights.type)

    def weights_of(self, name: str, n: int, n_out: int, n_in: int) -> None:
        """[n, n_out, n_in]: of experts, or of heads."""
        if self.exact:
            drawn = self.weights.f16(n, n_out, n_in, scale=1.0 / math.sqrt(n_in))
            self.out.add_tensor(name, drawn.astype(np.float32))
            return
        blocks = self.weights.quantized(n * n_out, n_in)
        self.out.add_tensor(name, blocks.reshape(n, n_out, -1), raw_dtype=self.weights.type)

    def factor(self, name: str, *sizes: int) -> None:
        """f16; its last dimension is what it multiplies."""
        self.out.add_tensor(name, self.weights.f16(*sizes, scale=1.0 / math.sqrt(sizes[-1])))

    def uniform(self, name: str, n: int, low: float, high: float) -> None:
        """f32."""
        self.out.add_tensor(name, self.weights.random.uniform(low, high, n).astype(np.float32))

    def constant(self, name: str, n: int, value: float = 1.0) -> None:
        """f32."""
        self.out.add_tensor(name, np.full(n, value, np.float32))


def add_attention(add: Tensors, blk: str, heads: Heads, sides: tuple[Side, Side]) -> None:
    shape = add.shape
    width_q, width_kv = shape.n_head * heads.head_dim, heads.n_kv * heads.head_dim
    is_gated = shape.architecture == "qwen35"
    add.weight(blk + "attn_q.weight", width_q * (2 if is_gated else 1), shape.n_embd)
    add.weight(blk + "attn_output.weight", shape.n_embd, width_q)
    if shape.architecture != "llama":
        scale = heads.head_dim**-0.5 if shape.architecture == "gemma4" else 1.0  # scores have no other
        add.constant(blk + "attn_q_norm.weight", heads.head_dim, scale)
        add.constant(blk + "attn_k_norm.weight", heads.head_dim)
    for letter, side in zip("kv", sides, strict=True):
        own = side.of(heads, shape)
        is_needed = own.keeps_projection or own.path == "value"
        if is_needed and (letter == "k" or heads.has_v):
            add.weight(blk + f"attn_{letter}.weight", width_kv, shape.n_embd)
        if own.path in ("full", "value"):
            continue
        n_rank, columns = own.rank * heads.n_kv // own.group, own.group * heads.head_dim
        if own.keeps_projection:
            add.factor(blk + f"attn_{letter}_e.weight", n_rank, columns)
        else:
            add.weight(blk + f"attn_{letter}_a.weight", n_rank, shape.n_embd)
        if own.path in ("rebuild", "latent"):
            add.factor(blk + f"attn_{letter}_b.weight", width_kv, own.rank)
        else:
            add.factor(blk + "attn_q_e.weight", heads.n_kv, own.rank, heads.head_dim)


def add_delta_net(add: Tensors, blk: str, net: DeltaNet) -> None:
    n_embd, inner = add.shape.n_embd, net.n_v * net.state_size
    add.weight(blk + "attn_qkv.weight", net.channels, n_embd)
    add.weight(blk + "attn_gate.weight", inner, n_embd)
    add.weight(blk + "ssm_alpha.weight", net.n_v, n_embd)
    add.weight(blk + "ssm_beta.weight", net.n_v, n_embd)
    add.weight(blk + "ssm_out.weight", n_embd, inner)
    conv = add.weights.f16(net.channels, net.conv_kernel, scale=0.5).astype(np.float32)
    add.out.add_tensor(blk + "ssm_conv1d.weight", conv)
    add.uniform(blk + "ssm_a", net.n_v, -8.0, -0.1)
    add.uniform(blk + "ssm_dt.bias", net.n_v, -5.0, -2.0)
    add.constant(blk + "ssm_norm.weight", net.state_size)


def add_layer(add: Tensors, layer: int, sides: tuple[Side, Side]) -> None:
    shape, blk = add.shape, f"blk.{layer}."
    if shape.mla:
        random_mla.add_layer(add, layer, shape.mla, sides[1])
        return
    norms = {
        "llama": ("attn_norm", "ffn_norm"),
        "qwen35": ("attn_norm", "post_attention_norm"),
        "gemma4": ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"),
    }
    for name in norms[shape.architecture]:
        add.constant(blk + f"{name}.weight", shape.n_embd)
    if shape.architecture == "gemma4":
        add.constant(blk + "layer_output_scale.weight", 1)
    if heads := shape.heads(layer):
        add_attention(add, blk, heads, sides)
    elif shape.delta_net:
        add_delta_net(add, blk, shape.delta_net)
    add.weight(blk + "ffn_gate.weight", shape.n_ff, shape.n_embd)
    add.weight(blk + "ffn_up.weight", shape.n_ff, shape.n_embd)
    add.weight(blk + "ffn_down.weight", shape.n_embd, shape.n_ff)


def write(
    shape: Shape, path: Path, sides: tuple[Side, Side], name: str, seed: int, *, exact: bool = False
) -> None:
    """Write the file; `sides`: K and V; exact: f32."""
    out = gguf.GGUFWriter(path, shape.architecture)
    out.add_name(f"{shape.name} shape, random {shape.weights}, {name}")
    add_sizes(out, shape)
    if any(side.path != "full" for side in sides):
        add_cache(out, shape, sides)
    add = Tensors(out, shape, seed, exact)
    freqs = rope_freqs(shape)
    if freqs is not None:
        out.add_tensor("rope_freqs.weight", freqs)
    add.weight("token_embd.weight", shape.n_vocab, shape.n_embd)
    add.constant("output_norm.weight", shape.n_embd)
    if shape.architecture != "gemma4":  # whose embeddings are its output
        add.weight("output.weight", shape.n_vocab, shape.n_embd)
    for layer in range(shape.n_layer):
        add_layer(add, layer, sides)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    write_tensors(out, path)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cache", default="full/full", help="K path/V path (default: full/full)")
    parser.add_argument(
        "--plan",
        choices=dict.fromkeys(share for share, _ in PLANS),
        help="a default file of this share of f16, in place of --cache",
    )
    parser.add_argument("--group", type=int, help="KV heads that share a latent of --plan")
    parser.add_argument("--prefer", choices=PREFER, default="speed", help="K path of --plan")
    parser.add_argument("--scales", choices=SCALES, default="segment", help="of the rows of --plan")
    parser.add_argument("--layers", type=int, help="the first so many layers alone")
    parser.add_argument("--vocab", type=int, help="so many tokens alone")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--exact", action="store_true", help="f32 weights, to compare implementations with")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    shape = replace(shape, n_layer=args.layers or shape.n_layer, n_vocab=args.vocab or shape.n_vocab)
    group = args.group or chosen_group(args.shape)
    sides = (
        planned(args.plan, args.prefer, shape, group, args.scales)
        if args.plan
        else sides_of(args.cache, shape)
    )
    name = f"default at {args.plan} %, {args.prefer}" if args.plan else args.cache
    write(shape, args.out, sides, name, args.seed, exact=args.exact)


if __name__ == "__main__":
    main()
