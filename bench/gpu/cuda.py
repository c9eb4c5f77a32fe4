"""Speed of whole models on a GPU: prefill and decode at growing depths, one session a cache format.

    python bench/gpu/cuda.py MODEL.gguf --kv f16,q8_0,small --depths 0,4096,16384,65536 --json out.json

Each session fills its cache by prefill, or with copies of its first rows, and is measured on the way. Times
are wall clock around whole calls, so they include copying logits and everything else a caller waits for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/

from command import arguments
from gpu.copied_rows import COPIED_FROM, Copies
from latentkv import _core
from latentkv.plan.master import planned

FILL = 8192  # tokens of a call that fills a cache


def ask_gpu(field: str) -> str:
    """What the driver says of the first GPU: `name`, `memory.used` in MiB."""
    query = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", "--id=0"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()


def used_mib() -> int:
    """Memory in use on the first GPU, by all processes: weights, cache, buffers and the driver's own."""
    return int(ask_gpu("memory.used"))


def fill(session: _core.Session, random: np.random.Generator, n_vocab: int, at: int, depth: int) -> None:
    """Random tokens from position `at` to `depth`."""
    for begin in range(at, depth, FILL):
        n = min(FILL, depth - begin)
        session.decode(random.integers(0, n_vocab, n).tolist(), output="none")


def step_times(
    session: _core.Session,
    random: np.random.Generator,
    n_vocab: int,
    seq: list[int],
    steps: int,
    skipped: int,
) -> list[float]:
    """Seconds of steps of one token of each of these sequences, without those `skipped`: the first builds the
    graph, the second records it."""
    times = []
    for _ in range(steps):
        tokens = random.integers(0, n_vocab, len(seq)).tolist()
        start = time.perf_counter()
        session.decode(tokens, seq=seq)
        times.append(time.perf_counter() - start)
    return times[skipped:]


def step_time(
    session: _core.Session, random: np.random.Generator, n_vocab: int, n: int, steps: int, skipped: int
) -> float:
    """Their median, of the first n sequences."""
    return statistics.median(step_times(session, random, n_vocab, list(range(n)), steps, skipped))


def measure(
    model: _core.Model, kv: str, depths: list[int], args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Rows of tokens per second; decode is the median of single steps. Depths rise by more than is measured
    at each: nothing is taken back, which windows and recurrent states would not allow."""
    random = np.random.default_rng(1)
    n_ctx = max(depths) + args.prefill + args.decode * len(depths) + 192
    options = planned(model, {"kv": kv, "n_ubatch": args.ubatch, "sink": args.sink, "recent": args.recent})
    session = _core.Session(model, n_ctx=n_ctx, **options)
    copies: Copies | None = None
    at = 0
    for depth in depths:
        if at > depth:
            raise SystemExit(f"error: --depths: expected {at} or more behind the one before; got {depth}")
        if args.copies and depth >= COPIED_FROM:
            if copies is None:
                fill(session, random, model.n_vocab, at, COPIED_FROM)
                copies = Copies(session)
            copies.fill(depth)
        else:
            fill(session, random, model.n_vocab, at, depth)
        steps = step_times(session, random, model.n_vocab, [0], args.decode, 3)
        step = statistics.median(steps)
        row = {
            "kv": kv,
            "depth": depth,
            "decode_tps": 1.0 / step,
            "decode_ms_min": 1e3 * min(steps),
            "bytes_per_token": session.kv_bytes()["per_token"],
        }
        if depth == args.prefill_depth:
            for n in (2, 4, 8):
                together = step_times(session, random, model.n_vocab, [0] * n, 8, 2)
                row[f"batch_of_{n}"] = statistics.median(together) / step
            tokens = random.integers(0, model.n_vocab, args.prefill).tolist()
            start = time.perf_counter()
            session.decode(tokens, output="last")
            row["prefill_tps"] = args.prefill / (time.perf_counter() - start)
        at = session.seq_pos_max(0) + 1
        row["device_mib"] = used_mib()
        print(json.dumps(row), file=sys.stderr, flush=True)
        yield row


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("model")
    parser.add_argument("--kv", default="f16,q8,q4")
    parser.add_argument("--depths", default="0,4096,16384,65536")
    parser.add_argument("--decode", type=int, default=35)
    parser.add_argument("--prefill", type=int, default=2048)
    parser.add_argument("--prefill-depth", type=int, default=16384)
    parser.add_argument("--ubatch", type=int, default=0, help="0 (default): as sessions choose")
    parser.add_argument("--sink", type=int, default=-1, help="exact first tokens (default: the file's)")
    parser.add_argument("--recent", type=int, default=-1, help="exact last tokens (default: the file's)")
    parser.add_argument(
        "--copies",
        action="store_true",
        help=f"fill beyond {COPIED_FROM} tokens with copies of their rows, not by prefill",
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    before = used_mib()
    model = _core.Model(args.model, n_gpu_layers=99)
    depths = [int(d) for d in args.depths.split(",")]
    rows: list[dict[str, Any]] = []
    result = {
        "model": model.metadata.get("general.name"),
        "rows": rows,
        "device_mib_before": before,
        "build": _core.build_info(),
    }
    for kv in args.kv.split(","):
        for row in measure(model, kv, depths, args):
            rows.append(row)
            if args.json:
                args.json.write_text(json.dumps(result, indent=1) + "\n")  # whatever ends it later


if __name__ == "__main__":
    main()
