"""Prefill and decode speed on a plain file, side by side with llama.cpp's llama-bench, in turns.

    python bench/speed.py MODEL.gguf --llama-bench PATH/llama-bench

Both read the same file with the same threads and cache type. Before anything is timed, this program checks
that prefill and decode give the same logits. Ratios above 1 mean latentkv is faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from latentkv import _core
from latentkv.measure.bench import measure
from record import RESULTS, Column, save

COLUMNS = [
    Column("kv", "cache"),
    Column("test", "test"),
    Column("depth", "depth"),
    Column("ours", "latentkv t/s", ".1f"),
    Column("theirs", "llama.cpp t/s", ".1f"),
    Column("ratio", "ratio", ".2f"),
]


def check(model: _core.Model, kv: str, n: int = 64) -> None:
    """Refuses to time a cache whose decode and prefill disagree."""
    tokens = np.random.default_rng(1).integers(0, model.n_vocab, n).tolist()
    whole = _core.Session(model, n_ctx=n, kv=kv).decode(tokens, output="all").astype(np.float64)
    session = _core.Session(model, n_ctx=n, kv=kv)
    steps = np.concatenate([session.decode([token]) for token in tokens]).astype(np.float64)
    error = float(np.linalg.norm(steps - whole) / np.linalg.norm(whole))
    if not error < (1e-3 if kv == "f16" else 0.1):
        raise SystemExit(
            f"error: [check] expected decode equal to prefill with {kv} rows; got distance {error:.2g}"
        )


def theirs(program: Path, model: Path, kv: str, depth: int, args: argparse.Namespace) -> dict[str, float]:
    command = [
        str(program),
        "-m",
        str(model),
        "-t",
        str(args.threads),
        "-d",
        str(depth),
        "-ctk",
        kv,
        "-ctv",
        kv,
    ]
    command += ["-fa", "1", "-p", str(args.prefill), "-n", str(args.decode), "-r", "2", "-o", "json"]
    rows = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return {"pp" if row["n_prompt"] else "tg": float(row["avg_ts"]) for row in rows}


def ours(model: _core.Model, kv: str, depth: int, args: argparse.Namespace) -> dict[str, float]:
    options = {"n_threads": args.threads}
    found = measure(
        model, kv, depth, prefill=args.prefill, decode=args.decode, repetitions=2, options=options
    )
    return {row.test: row.mean for row in found}


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed against llama-bench on the same plain GGUF.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-bench", type=Path, required=True)
    parser.add_argument("--kv", default="f16,q8_0,q4_0")
    parser.add_argument("--depth", default="0,1024,3500")
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--decode", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="turns of both programs; medians are kept")
    parser.add_argument("--save", help="name of the result under bench/results")
    args = parser.parse_args()

    model = _core.Model(str(args.model))
    rows: list[dict[str, Any]] = []
    for kv in args.kv.split(","):
        check(model, kv)
        for depth in map(int, args.depth.split(",")):
            pairs = [
                (ours(model, kv, depth, args), theirs(args.llama_bench, args.model, kv, depth, args))
                for _ in range(args.rounds)
            ]
            for test, count in (("pp", args.prefill), ("tg", args.decode)):
                row = {
                    "kv": kv,
                    "test": f"{test}{count}",
                    "depth": depth,
                    "ours": statistics.median(mine[test] for mine, _ in pairs),
                    "theirs": statistics.median(other[test] for _, other in pairs),
                    "ratio": statistics.median(mine[test] / other[test] for mine, other in pairs),
                }
                rows.append(row)
                print(
                    "{kv:>5} {test} @ d{depth}: {ours:.1f} / {theirs:.1f} = {ratio:.2f}".format(**row),
                    flush=True,
                )
    if args.save:
        build = _core.build_info()
        command = f"python bench/speed.py {args.model.name} --llama-bench llama-bench --save {args.save}"
        note = (
            f"ggml {build['ggml']} in both programs, {args.threads} threads, median of {args.rounds} turns."
        )
        save(RESULTS / f"{args.save}.json", command=command, columns=COLUMNS, rows=rows, note=note)


if __name__ == "__main__":
    main()
