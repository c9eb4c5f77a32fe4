"""Tokens per second and memory by the number of layers on the GPU (`-ngl`), each in a process of its own.

    python bench/gpu/layers.py [MODEL] [--layers 0,8,16,24,32] [--depth N] [-t N] [--save NAME]

MODEL is a GGUF; without it one of random weights in Llama-3.1-8B's shape, with rows as `convert` writes them
by default. Before a number of layers is timed, its logits have to be those of all layers on the GPU, within
`TOLERANCE` of their norm: both sides round activations to 8 bits for products with quantized weights. Memory
is what the GPU has less than before, beside what `-ngl auto` would count on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/

from command import arguments
from inputs import random_model, random_rows
from inputs.random_shapes import SHAPES
from record import RESULTS, Column, save

COLUMNS = [
    Column("layers", "layers on the GPU"),
    Column("decode", "decode, tokens/s", ".1f"),
    Column("prompt", "prompt, tokens/s", ",.0f"),
    Column("forecast", "GPU memory, forecast MiB", ",.0f"),
    Column("taken", "taken MiB", ",.0f"),
    Column("host", "on the host, forecast MiB", ",.0f"),
    Column("error", "logits differ by", ".1e"),
]
STEPS, SKIPPED = 24, 4
CHECKED = 96  # tokens: fewer than exact windows keep, so that nothing is quantized
TOLERANCE = 0.05


def logits(session: Any, n_vocab: int) -> np.ndarray:
    tokens = np.random.default_rng(2).integers(0, n_vocab, CHECKED).tolist()
    found = np.asarray(session.decode(tokens, output="last"), np.float64)
    session.clear()
    return found


def measured(model_path: str, layers: int, depth: int, threads: int) -> dict[str, Any]:
    from gpu import cuda
    from latentkv import _core
    from latentkv.plan.fit import Need, needs

    before = _core.gpu_memory()
    if not before:
        raise SystemExit("error: [GPU] expected one; got none")
    model = _core.Model(model_path, n_gpu_layers=layers)
    n_ctx = depth + STEPS + 256
    session = _core.Session(model, n_ctx=n_ctx, n_threads=threads, n_threads_batch=threads)
    first = logits(session, model.n_vocab)
    random = np.random.default_rng(1)
    begin = time.perf_counter()
    cuda.fill(session, random, model.n_vocab, 0, depth)
    prompt = time.perf_counter() - begin
    step = cuda.step_time(session, random, model.n_vocab, 1, STEPS, SKIPPED)
    after = _core.gpu_memory()
    forecast = needs(model.forecast(n_ctx))
    return {
        "layers": min(layers, model.n_layer),
        "decode": 1 / step,
        "prompt": depth / prompt,
        "forecast": forecast.get(0, Need()).total / (1 << 20),
        "taken": (before[0][0] - after[0][0]) / (1 << 20),
        "host": forecast[None].total / (1 << 20),
        "logits": first.reshape(-1)[:4096].tolist(),
    }


def run(args: argparse.Namespace, path: Path, what: str) -> None:
    from gpu import cuda

    asked = [int(number) for number in args.layers.split(",")]
    rows: list[dict[str, Any]] = []
    reference: np.ndarray | None = None
    for layers in sorted(asked, reverse=True):
        words = [sys.executable, __file__, str(path), "--one", str(layers)]
        words += ["--depth", str(args.depth), "-t", str(args.threads)]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
        row = json.loads(done.stdout)
        found = np.array(row.pop("logits"))
        reference = found if reference is None else reference
        row["error"] = float(np.linalg.norm(found - reference) / np.linalg.norm(reference))
        if row["error"] > TOLERANCE:
            raise SystemExit(f"error: [logits] expected at most {TOLERANCE}; got {row}")
        rows.append(row)
        print(json.dumps(row), flush=True)
    note = (
        f"{cuda.ask_gpu('name')}, {args.threads or 'all'} threads; {what}; depth {args.depth:,}. Taken: with "
        "the kernels' scratch and ggml's pools, without CUDA's context."
    )
    words = ["python", "bench/gpu/layers.py", *([args.model] if args.model else [])]
    command = " ".join([*words, "--layers", args.layers, "--depth", str(args.depth)])
    save(args.out / f"{args.save}.json", command=command, columns=COLUMNS, rows=rows[::-1], note=note)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--layers", default="0,8,16,24,28,32")
    parser.add_argument("--depth", type=int, default=2048)
    parser.add_argument("-t", "--threads", type=int, default=0)
    parser.add_argument("--save", default="layers-8b", metavar="NAME")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(measured(args.model, args.one, args.depth, args.threads)))
        return
    if args.model:
        run(args, Path(args.model), f"`{Path(args.model).name}`")
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        shape = SHAPES["8b"]
        pair = random_rows.planned("14", "speed", shape, random_rows.chosen_group("8b"))
        random_model.write(shape, path, pair, "14%", 1)
        run(args, path, f"{shape.name}'s shape, random Q4_0 weights, rows of 14 %")


if __name__ == "__main__":
    main()
