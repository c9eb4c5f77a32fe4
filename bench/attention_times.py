"""What attention to the cache costs on a GPU, measured and fitted: the file that `convert --gpu-times` reads.

    python bench/attention_times.py gpu.json
    python bench/gpu/consumer.py rtx4090 --no-readers -- python bench/attention_times.py rtx4090.json \\
        --gpu "an RTX 4090, from parts" --capabilities 8.6,8.9 --gb-per-s 937

Random models of a small vocabulary, most of few layers, in the shapes of Llama-3.1-8B and Llama-2-7B: full
f16 rows, and rows as the planner cuts them for groups of 8 to 1 KV heads at several budgets. A time is the
median decode step of one token at a depth less that of an empty cache, over the layers.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import record
from command import arguments
from gpu import cuda
from gpu.copied_rows import COPIED_FROM, Copies
from inputs import random_rows
from inputs.random_rows import Side
from inputs.random_shapes import SHAPES, Shape
from latentkv import _core
from latentkv_convert.ir import LayerPlan
from latentkv_convert.plan.times import features, gpu_file
from latentkv_convert.plan.times.gpu_file import Measured, side_of

N_VOCAB = 2048
N_WRITERS = 4  # files that are made while others are measured
FEW, MANY = 8, 32  # layers: what a step has once shows in their difference
SHALLOW, DEEP = (4096, 16384), (4096, 16384, 65536)
# Shape, share of f16, KV heads in a group, preference, depths, layers. None: full f16 rows. At one share all
# formats grow and shrink together, so their costs are told apart by others.
FILES: tuple[tuple[str, str | None, int, str, tuple[int, ...], int], ...] = (
    ("8b", None, 1, "", DEEP, FEW),
    ("8b", "14", 4, "speed", DEEP, FEW),
    ("8b", "14", 8, "speed", DEEP, FEW),
    ("8b", "28", 4, "speed", SHALLOW, FEW),
    ("8b", "14", 4, "size", SHALLOW, FEW),
    ("7b", None, 1, "", SHALLOW, FEW),
    ("7b", "14", 8, "speed", SHALLOW, FEW),
    ("8b", "8.5", 4, "speed", SHALLOW, FEW),
    ("8b", "14", 2, "speed", DEEP, FEW),
    ("8b", "28", 8, "speed", SHALLOW, FEW),
    ("8b", "8.5", 8, "speed", SHALLOW, FEW),
    ("8b", "14", 8, "size", SHALLOW, FEW),
    ("8b", "14", 4, "speed", DEEP, MANY),
    ("8b", None, 1, "", DEEP, MANY),
    ("8b", "14", 1, "speed", SHALLOW, FEW),
    ("8b", "28", 2, "speed", SHALLOW, FEW),
    ("7b", "14", 4, "speed", SHALLOW, FEW),
    ("7b", "8.5", 8, "speed", SHALLOW, FEW),
    ("7b", "14", 8, "size", (4096,), FEW),
    ("7b", "14", 8, "speed", SHALLOW, MANY),
    ("7b", None, 1, "", SHALLOW, MANY),
)
SHARED_KB = {"8.0": 163, "8.7": 163, "9.0": 227, "10.0": 227, "10.3": 227}  # a thread block's; others have 99
ROUNDS, STEPS = 4, 24  # at a depth; fewer steps than the window holds: none reads a latent at depth 0
SKIPPED = 3  # of a round: the first run builds the graph, the second records it


@dataclass(frozen=True)
class Spec:
    """One file to measure."""

    shape: str
    share: str | None
    group: int
    prefer: str
    depths: tuple[int, ...]
    n_layer: int

    @property
    def name(self) -> str:
        if self.share is None:
            return f"{self.shape}, full f16"
        return f"{self.shape}, {self.share} %, {self.prefer}, groups of {self.group}"

    def sizes(self) -> Shape:
        return replace(SHAPES[self.shape], n_layer=self.n_layer, n_vocab=N_VOCAB)

    def sides(self) -> tuple[Side, Side]:
        if self.share is None:
            return random_rows.sides_of("full/full", self.sizes())
        return random_rows.planned(self.share, self.prefer, self.sizes(), self.group)


def write(spec: Spec, path: Path) -> None:
    """By a program that asks for no GPU, as on any card."""
    program = Path(__file__).resolve().parent / "inputs" / "random_model.py"
    cache = ["--plan", spec.share, "--group", str(spec.group), "--prefer", spec.prefer] if spec.share else []
    sizes = ["--layers", str(spec.n_layer), "--vocab", str(N_VOCAB)]
    command = [sys.executable, str(program), spec.shape, str(path), *cache, *sizes]
    subprocess.run(command, check=True, env=os.environ | {"LD_PRELOAD": ""})


def step_times(path: Path, full: bool, depths: tuple[int, ...], ubatch: int) -> Iterator[tuple[int, float]]:
    """(depth, microseconds of a step), from an empty cache on."""
    random = np.random.default_rng(1)
    model = _core.Model(str(path), n_gpu_layers=99)
    session = _core.Session(
        model, n_ctx=max(depths) + STEPS + 192, kv="f16" if full else "", n_ubatch=ubatch, sink=-1, recent=-1
    )
    copies: Copies | None = None
    for depth in (0, *depths):
        if depth and copies is None:
            cuda.fill(session, random, model.n_vocab, 0, COPIED_FROM)
            copies = Copies(session)
        if copies is not None:
            copies.fill(depth)
        steps = []
        for _ in range(ROUNDS):
            for number, token in enumerate(random.integers(0, model.n_vocab, STEPS).tolist()):
                start = time.perf_counter()
                session.decode([token])
                if number >= SKIPPED:
                    steps.append(time.perf_counter() - start)
            assert session.seq_rm(0, depth, -1)
        yield depth, 1e6 * statistics.median(steps)


def measured(spec: Spec, path: Path, ubatch: int, gb_per_s: float) -> Measured:
    """gb_per_s: of the memory that rows are read from, where it is slower than here."""
    shape, sides = spec.sizes(), spec.sides()
    steps = dict(step_times(path, spec.share is None, spec.depths, ubatch))
    layer = LayerPlan(*(side_of(shape.n_kv, side.path, side.group, side.segments) for side in sides))
    counted = features.full(shape) if spec.share is None else features.of(shape, layer)
    assert counted is not None
    mb = counted.slot.get("full_bytes", 0.0) + counted.slot.get("stored", 0.0)  # of a slot
    us = {
        depth: max((steps[depth] - steps[0]) / shape.n_layer, 1e3 * mb * depth / gb_per_s)
        for depth in spec.depths
    }
    print(spec.name, {depth: round(each, 1) for depth, each in us.items()}, file=sys.stderr, flush=True)
    return Measured(
        spec.name, f"{steps[0]:.0f} us a step at depth 0", shape.n_layer, shape.n_head, shape.n_kv,
        shape.head_dim, layer, us
    )  # fmt: skip


def measure_all(folder: Path, ubatch: int, gb_per_s: float) -> Iterator[list[Measured]]:
    """What is measured, after every file."""
    found: list[Measured] = []
    with ThreadPoolExecutor(N_WRITERS) as writers:
        specs = [(Spec(*each), folder / f"{n}.gguf") for n, each in enumerate(FILES)]
        written = [writers.submit(write, *each) for each in specs[:N_WRITERS]]
        for n, (spec, path) in enumerate(specs):
            written[n].result()
            if n + N_WRITERS < len(specs):
                written.append(writers.submit(write, *specs[n + N_WRITERS]))
            found.append(measured(spec, path, ubatch, gb_per_s))
            path.unlink()
            yield found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "out", type=Path, metavar="FILE.json", help="file to write, anew after every measurement"
    )
    parser.add_argument("--gpu", help="its name (default: what the driver says)")
    parser.add_argument(
        "--capabilities", help="compute capabilities that convert takes this file for, such as 8.6,8.9"
    )
    parser.add_argument(
        "--gb-per-s",
        type=float,
        default=float("inf"),
        help="what a kernel that reads gets on the GPU that the file is for, if less than here",
    )
    parser.add_argument("--shared-kb", type=int, help="shared memory of a thread block (default: the GPU's)")
    parser.add_argument(
        "--ubatch", type=int, default=512, help="of the tokens that fill a cache (default 512)"
    )
    args = parser.parse_args()
    gpu = args.gpu or cuda.ask_gpu("name")
    info: dict[str, Any] = _core.build_info()
    build = f"commit {record.commit()}, ggml {info['ggml']}, {info['compiler']}"
    command = f"python bench/attention_times.py {args.out.name}"
    capabilities = args.capabilities.split(",") if args.capabilities else [cuda.ask_gpu("compute_cap")]
    shared_kb = args.shared_kb or SHARED_KB.get(capabilities[-1], 99)
    with tempfile.TemporaryDirectory() as folder:
        for files in measure_all(Path(folder), args.ubatch, args.gb_per_s):
            found = gpu_file.document(gpu, capabilities, command, build, files, shared_kb)
            args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({"coefficients": found["coefficients"], "fit": found["fit"]}, indent=1))


if __name__ == "__main__":
    main()
