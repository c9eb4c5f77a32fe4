"""Decoding by how full a cache is, and the longest wait for a token while older ones are compressed.

    python bench/fill/speed.py -c 131072 f16=8b.gguf:f16 14=8b-14.gguf fixed=8b-14.gguf:fixed

All caches have room for the context and are filled to one depth after another; there they decode in turns, so
that what slows the machine slows all. The first cache is the one that others are compared with.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/

from fill.caches import Cache, Table, exact, opened, program, session
from gpu import cuda
from record import Column, cpu_name

COLUMNS = [
    Column("cache", "cache"),
    Column("depth", "depth"),
    Column("exact", "of them exact"),
    Column("speed", "tokens/s", ".1f"),
    Column("share", "of the first", ".1%"),
    Column("median", "median step, ms", ".2f"),
    Column("longest", "longest", ".2f"),
    Column("prompt", "prompt tokens/s", ".0f"),
    Column("read", "rows read by choice", ".0f"),
]


def decoded(each: Any, n: int) -> list[float]:
    """Seconds of n steps of a token."""
    times = []
    for _ in range(n):
        begin = time.perf_counter()
        each.decode([17], output="last")
        times.append(time.perf_counter() - begin)
    return times


def filled(each: Any, n: int, n_vocab: int, seed: int) -> float:
    """Adds n tokens; returns seconds."""
    tokens = np.random.default_rng(seed).integers(10, n_vocab - 10, n).tolist()
    begin = time.perf_counter()
    each.decode(tokens, output="last")
    return time.perf_counter() - begin


def main() -> int:
    of = program(__doc__, 131072, 99)
    of.add_argument("--depths", default="512,4096,16384,32768,65536,130000")
    of.add_argument("--steps", type=int, default=64, help="tokens a turn (default 64)")
    of.add_argument("--turns", type=int, default=3)
    of.add_argument("--threads", type=int, default=0)
    args = of.parse_args()
    caches = [Cache.parse(text) for text in args.caches]
    models = opened(caches, args.ngl, "stored")
    sessions = [session(models[each.file], each, args.context, n_threads=args.threads) for each in caches]
    n_vocab = models[caches[0].file].n_vocab
    table = Table(COLUMNS)
    for depth in map(int, args.depths.split(",")):
        prompts = []
        for each in sessions:
            missing = depth - each.n_cells_used()
            prompts.append(missing / filled(each, missing, n_vocab, depth))
        for each in sessions:
            decoded(each, 4)
        times: list[list[float]] = [[] for _ in caches]
        read = [each.rows_read() for each in sessions]
        for _ in range(args.turns):
            for at, each in enumerate(sessions):
                times[at] += decoded(each, args.steps)
        first = np.sum(times[0])
        for at, each in enumerate(caches):
            row = {
                "cache": each.name,
                "depth": depth,
                "exact": exact(sessions[at]),
                "speed": float(len(times[at]) / np.sum(times[at])),
                "share": float(first / np.sum(times[at])),
                "median": 1e3 * float(np.median(times[at])),
                "longest": 1e3 * float(np.max(times[at])),
                "prompt": prompts[at],
                "read": (sessions[at].rows_read() - read[at]) / len(times[at]),
                "megabytes": round(sessions[at].kv_bytes()["total"] / 1e6),
            }
            table.add(row)
    where = cuda.ask_gpu("name") if args.ngl else cpu_name()
    table.keep(args, "speed", f"{where}, context {args.context}, {args.turns} turns of {args.steps} tokens.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
