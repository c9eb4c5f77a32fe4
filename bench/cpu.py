"""Decoding on a CPU: the default file of a model beside the model's own GGUF with full rows, in turns.

    python bench/cpu.py MODEL [--converted FILE] [-d 0,4096,7900] [-t N] [--save NAME]

MODEL is a name of bench/inputs/real_models.py or a GGUF; it is converted with the converter's defaults unless
--converted names the result. Every cache is filled once per depth, then all decode in turns, so that what
else the machine does meets all of them. Before that decode has to agree with prefill.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from command import arguments
from inputs import real_models
from latentkv import _core
from latentkv.plan.master import planned
from record import RESULTS, Column, save

COLUMNS = [
    Column("cache", "cache"),
    Column("depth", "depth"),
    Column("bytes", "bytes per token", ".0f"),
    Column("speed", "tokens/s", ".1f"),
    Column("ratio", "of f16", ".2f", "x"),
]
# Decode and prefill, by relative norm of logits: weights of 4 bits round activations, rows get other codes.
AGREE = 0.1


class Cache:
    """A session that is filled to one depth and decodes from there again and again."""

    def __init__(self, name: str, model: Any, kv: str, depth: int, args: argparse.Namespace) -> None:
        self.name, self.depth = name, depth
        options = {"kv": kv, "n_threads": args.threads, "n_threads_batch": args.threads}
        self.session = _core.Session(model, n_ctx=depth + args.tokens, **planned(model, options))
        self.tokens = np.random.default_rng(0).integers(0, model.n_vocab, depth + args.tokens).tolist()
        if depth:
            self.session.decode(self.tokens[:depth], output="none")
        self.seconds: list[float] = []

    def turn(self) -> None:
        begin = time.perf_counter()
        for token in self.tokens[self.depth :]:
            self.session.decode([token], output="last")
        self.seconds.append((time.perf_counter() - begin) / (len(self.tokens) - self.depth))
        self.session.seq_rm(0, self.depth, -1)

    def row(self) -> dict[str, Any]:
        speed = 1 / statistics.median(self.seconds[1:])
        return {
            "cache": self.name,
            "depth": self.depth,
            "bytes": self.session.kv_bytes()["per_token"],
            "speed": speed,
        }


def check(name: str, model: Any, kv: str, n: int = 300) -> None:
    tokens = np.random.default_rng(1).integers(0, model.n_vocab, n).tolist()
    options = planned(model, {"kv": kv})
    whole = _core.Session(model, n_ctx=n, **options).decode(tokens, output="last").astype(np.float64)
    session = _core.Session(model, n_ctx=n, **options)
    for token in tokens:
        last = session.decode([token], output="last")
    error = float(np.linalg.norm(last - whole) / np.linalg.norm(whole))
    if not error < AGREE:
        raise SystemExit(f"error: [check] expected decode equal to prefill, {name}; got distance {error:.2g}")


def converted(plain: Path, folder: str) -> Path:
    output = Path(folder) / "default.gguf"
    command = [sys.executable, "-m", "latentkv", "convert", str(plain), "-o", str(output), "--no-plot"]
    subprocess.run(command, check=True)
    return output


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("model", help=f"{', '.join(real_models.MODELS)} or a GGUF")
    parser.add_argument("--converted", type=Path, help="what `latentkv convert` made of it")
    parser.add_argument("-d", "--depth", default="0,4096,7900")
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=16, help="of a turn (default 16)")
    parser.add_argument("--rounds", type=int, default=7, help="turns, the first not counted (default 7)")
    parser.add_argument("--save", help="name of the result under bench/results")
    args = parser.parse_args()
    plain = real_models.model_path(args.model)
    with tempfile.TemporaryDirectory() as folder:
        models = {
            "default file": (_core.Model(str(args.converted or converted(plain, folder))), ""),
            **{f"full {kv}": (_core.Model(str(plain)), kv) for kv in ("f16", "q8_0", "q4_0")},
        }
        rows = [row for depth in map(int, args.depth.split(",")) for row in measured(models, depth, args)]
    if args.save:
        words = ["python", "bench/cpu.py", real_models.shown(args.model), "-d", args.depth]
        words += ["-t", str(args.threads), "--save", args.save]
        note = f"`{plain.name}`, its own weights; {args.threads} threads, median of {args.rounds - 1} turns."
        save(RESULTS / f"{args.save}.json", command=shlex.join(words), columns=COLUMNS, rows=rows, note=note)
    return 0


def measured(models: dict[str, Any], depth: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    if not depth:
        for name, (model, kv) in models.items():
            check(name, model, kv)
    caches = [Cache(name, model, kv, depth, args) for name, (model, kv) in models.items()]
    for _ in range(args.rounds):
        for cache in caches:
            cache.turn()
    rows = [cache.row() for cache in caches]
    f16 = next(row["speed"] for row in rows if row["cache"] == "full f16")
    for row in rows:
        row["ratio"] = row["speed"] / f16
        print("{cache:>12} @ {depth}: {speed:.1f} t/s, {ratio:.2f} of f16".format(**row), flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
