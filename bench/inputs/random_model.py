"""Write a model of random Q4_0 weights in a known shape, its cache described as asked, to measure speed.

    python bench/inputs/random_model.py 8b out.gguf --cache rotated:64/latent:64
    python bench/inputs/random_model.py 8b out.gguf --plan 14      # rows as `convert` writes them by default

The file has no tokenizer. Its logits mean nothing; its speed is that of a real file of the same shape.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np


@dataclass(frozen=True)
class Shape:
    """Sizes of a llama-style decoder."""

    name: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_kv: int
    n_vocab: int
    rope_base: float
    head_dim: int = 128
    rope_factor: float = 1.0  # Llama-3.1's, of slow planes


SHAPES = {
    "8b": Shape("Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128256, 500000.0, rope_factor=8.0),
    "7b": Shape("Llama-2-7B", 32, 4096, 11008, 32, 32, 32000, 10000.0),
    "66b": Shape("OPT-66B", 64, 9216, 36864, 72, 72, 50272, 10000.0),
    "tiny": Shape("tiny", 2, 256, 512, 4, 2, 512, 10000.0, 64),
    "small": Shape("small", 2, 512, 1024, 16, 4, 512, 500000.0, rope_factor=8.0),
}


# Rows of a group of KV heads of 128 as the planner cuts them, by share of f16 and heads in a group: (format,
# channels) of K and V. All of a share take the same bytes. Other groups are scaled from eight heads.
PLAN_HEADS = 8
# Heads that `convert` takes for a group with --prefer speed (an H100's times); 8 where a shape is not here.
CHOSEN_GROUPS = {"8b": 4}
PLANS = {
    ("28", 8): (
        (("q8", 128), ("q8", 256), ("q4", 128), ("q4", 256), ("q2", 128)),
        (("q8", 192), ("q4", 192), ("q4", 256), ("q2", 192), ("q1", 64)),
    ),
    ("14", 8): (
        (("q8", 64), ("q4", 128), ("q4", 128), ("q2", 128), ("q2", 128), ("q2", 64), ("q1", 128)),
        (("q4", 128), ("q4", 128), ("q2", 128), ("q2", 128), ("q1", 128), ("q1", 128)),
    ),
    ("14", 4): (
        (("q8", 32), ("q4", 128), ("q2", 128), ("q1", 64), ("q1", 32)),
        (("q4", 128), ("q2", 128), ("q1", 128)),
    ),
    ("14", 2): (
        (("q4", 64), ("q2", 64), ("q2", 32), ("q1", 32)),
        (("q4", 64), ("q2", 64), ("q1", 64)),
    ),
    ("14", 1): (
        (("q4", 32), ("q2", 64)),
        (("q4", 32), ("q1", 64)),
    ),
    ("8.5", 8): (
        (("q4", 64), ("q4", 128), ("q2", 64), ("q2", 128), ("q1", 128)),
        (("q4", 64), ("q2", 64), ("q2", 128), ("q1", 128), ("q1", 128)),
    ),
}
SINK, RECENT = 4, 128  # the planner's exact windows


Segments = tuple[tuple[str, int], ...]  # row format and channels, by importance


@dataclass(frozen=True)
class Side:
    """One side of the cache: its path, the KV heads that share a latent, that latent's rank and rows."""

    path: str
    group: int
    rank: int
    segments: Segments = ()  # none: one format, chosen when the file is opened

    @property
    def keeps_projection(self) -> bool:
        """Form E (docs/gguf.md), which planned files have for their exact windows."""
        return self.path in ("full", "rotated") or bool(self.segments)

    @classmethod
    def parse(cls, text: str, shape: Shape) -> Side:
        """`full`, `rotated:64`, `rebuild:256:4` (path, rank, heads in a group)."""
        path, *numbers = text.split(":")
        if path == "full":
            return cls("full", 1, shape.head_dim)
        rank, group = (int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 1)
        return cls(path, group, rank)


def planned(plan: str, prefer: str, group: int = PLAN_HEADS) -> tuple[Side, Side]:
    """K and V of a file that `convert` writes by default, or with --group."""
    k_path = {"speed": "rotated", "size": "rebuild"}[prefer]
    known = PLANS.get((plan, group))
    k, v = known or (scaled(segments, group) for segments in PLANS[plan, PLAN_HEADS])
    return (
        Side(k_path, group, sum(n for _, n in k), k),
        Side("latent", group, sum(n for _, n in v), v),
    )


def scaled(segments: Segments, group: int) -> Segments:
    """Rows of a narrower group at about the same share: every format's channels in proportion, in units of
    32.

    >>> scaled((("q4", 128), ("q4", 256), ("q1", 256)), 2)
    (('q4', 96), ('q1', 64))
    """
    channels: dict[str, int] = {}
    for name, n in segments:
        channels[name] = channels.get(name, 0) + n
    units = {name: round(n * group / PLAN_HEADS / 32) for name, n in channels.items()}
    return tuple((name, 32 * n) for name, n in units.items() if n)


def rope_freqs(shape: Shape) -> np.ndarray:
    """What each RoPE plane is slower by, [head_dim / 2], as Llama-3.1's files have it.

    1 for waves of up to 2048 positions, the factor from 8192 on, and between them what lies between.
    """
    wave = 2 * np.pi * shape.rope_base ** (np.arange(0, shape.head_dim, 2) / shape.head_dim)
    smooth = np.clip((8192 / wave - 1) / 3, 0, 1)
    return (1 / (smooth + (1 - smooth) / shape.rope_factor)).astype(np.float32)


class Weights:
    """Random tensors, seeded; large ones repeat one block of random bytes at different offsets."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        n_blocks = 1 << 20
        self.blocks = self.random.integers(0, 256, (n_blocks, 18), dtype=np.uint8)
        scales = (self.random.uniform(0.5, 1.5, n_blocks) * 0.02 / 4.6).astype(np.float16)
        self.blocks[:, :2] = scales.view(np.uint8).reshape(n_blocks, 2)

    def q4_0(self, n_out: int, n_in: int) -> np.ndarray:
        """[n_out, n_in] of standard deviation 0.02, as bytes of Q4_0 rows."""
        n = n_out * n_in // 32
        first = int(self.random.integers(0, len(self.blocks)))
        rows = np.resize(np.roll(self.blocks, -first, axis=0), (n, 18))
        return rows.reshape(n_out, n_in // 32 * 18)

    def f16(self, *shape: int, scale: float) -> np.ndarray:
        """Normal values of this standard deviation."""
        return (self.random.standard_normal(shape, dtype=np.float32) * scale).astype(np.float16)


def sides_of(cache: str, shape: Shape) -> tuple[Side, Side]:
    """K and V of `full/full` or `rotated:512:8/latent:512:8`."""
    k, v = cache.split("/")
    return Side.parse(k, shape), Side.parse(v, shape)


def write(
    shape: Shape, path: Path, sides: tuple[Side, Side], name: str, seed: int, *, exact: bool = False
) -> None:
    """Write the file; `sides`: K and V; exact: f32."""
    k, v = sides
    weights = Weights(seed)
    out = gguf.GGUFWriter(path, "llama")
    out.add_name(f"{shape.name} shape, random Q4_0, {name}")
    out.add_block_count(shape.n_layer)
    out.add_context_length(131072)
    out.add_embedding_length(shape.n_embd)
    out.add_feed_forward_length(shape.n_ff)
    out.add_head_count(shape.n_head)
    out.add_head_count_kv(shape.n_kv)
    out.add_key_length(shape.head_dim)
    out.add_value_length(shape.head_dim)
    out.add_rope_dimension_count(shape.head_dim)
    out.add_rope_freq_base(shape.rope_base)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_vocab_size(shape.n_vocab)
    out.add_tokenizer_model("no_vocab")
    if (k.path, v.path) != ("full", "full"):
        out.add_uint32("latentkv.version", 1)
        for side, name in ((k, "k"), (v, "v")):
            n_groups = shape.n_kv // side.group
            out.add_array(f"latentkv.{name}.path", [side.path] * shape.n_layer)
            out.add_array(f"latentkv.{name}.group", [side.group] * shape.n_layer)
            out.add_array(f"latentkv.{name}.ranks", [side.rank] * (n_groups * shape.n_layer))
            if side.segments:
                every = n_groups * shape.n_layer
                formats, widths = zip(*side.segments, strict=True)
                out.add_array(f"latentkv.{name}.segment_counts", [len(widths)] * every)
                out.add_array(f"latentkv.{name}.segment_widths", list(widths) * every)
                out.add_array(f"latentkv.{name}.segment_formats", list(formats) * every)
        if k.segments:
            out.add_uint32("latentkv.regions.sink", SINK)
            out.add_uint32("latentkv.regions.recent", RECENT)

    if shape.rope_factor != 1:
        out.add_tensor("rope_freqs.weight", rope_freqs(shape))

    def q4(name: str, n_out: int, n_in: int) -> None:
        if exact:
            out.add_tensor(name, weights.f16(n_out, n_in, scale=1.0 / math.sqrt(n_in)).astype(np.float32))
            return
        out.add_tensor(name, weights.q4_0(n_out, n_in), raw_dtype=gguf.GGMLQuantizationType.Q4_0)

    def ones(name: str) -> None:
        out.add_tensor(name, np.ones(shape.n_embd, np.float32))

    q4("token_embd.weight", shape.n_vocab, shape.n_embd)
    ones("output_norm.weight")
    q4("output.weight", shape.n_vocab, shape.n_embd)
    width_q, width_kv = shape.n_head * shape.head_dim, shape.n_kv * shape.head_dim
    for layer in range(shape.n_layer):
        blk = f"blk.{layer}."
        ones(blk + "attn_norm.weight")
        ones(blk + "ffn_norm.weight")
        q4(blk + "attn_q.weight", width_q, shape.n_embd)
        q4(blk + "attn_output.weight", shape.n_embd, width_q)
        q4(blk + "ffn_gate.weight", shape.n_ff, shape.n_embd)
        q4(blk + "ffn_up.weight", shape.n_ff, shape.n_embd)
        q4(blk + "ffn_down.weight", shape.n_embd, shape.n_ff)
        for side, name in ((k, "k"), (v, "v")):
            if side.keeps_projection:
                q4(blk + f"attn_{name}.weight", width_kv, shape.n_embd)
            if side.path == "full":
                continue
            n_rank, columns = side.rank * shape.n_kv // side.group, side.group * shape.head_dim
            if side.keeps_projection:
                e = weights.f16(n_rank, columns, scale=1.0 / math.sqrt(columns))
                out.add_tensor(blk + f"attn_{name}_e.weight", e)
            else:
                q4(blk + f"attn_{name}_a.weight", n_rank, shape.n_embd)
            if side.path in ("rebuild", "latent"):
                b = weights.f16(width_kv, side.rank, scale=1.0 / math.sqrt(side.rank))
                out.add_tensor(blk + f"attn_{name}_b.weight", b)
            else:
                out.add_tensor(
                    blk + "attn_q_e.weight",
                    weights.f16(shape.n_kv, side.rank, shape.head_dim, scale=1.0 / math.sqrt(shape.head_dim)),
                )
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cache", default="full/full", help="K path/V path (default: full/full)")
    parser.add_argument(
        "--plan",
        choices=dict.fromkeys(share for share, _ in PLANS),
        help="a default file of this share of f16, in place of --cache",
    )
    parser.add_argument(
        "--group", type=int, default=PLAN_HEADS, help="KV heads that share a latent of --plan"
    )
    parser.add_argument("--prefer", choices=("speed", "size"), default="speed", help="K path of --plan")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--exact", action="store_true", help="f32 weights, to compare implementations with")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    sides = planned(args.plan, args.prefer, args.group) if args.plan else sides_of(args.cache, shape)
    name = f"default at {args.plan} %, {args.prefer}" if args.plan else args.cache
    write(shape, args.out, sides, name, args.seed, exact=args.exact)


if __name__ == "__main__":
    main()
