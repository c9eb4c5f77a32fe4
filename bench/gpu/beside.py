"""Decode from several caches in turn, in one process: the first, the second, the first again, …

    python bench/gpu/consumer.py rtx4090 -- python bench/gpu/beside.py 8b.gguf=f16 8b-14.gguf --depths 0,16384

What memory gives beside readers drifts (consumer.py), so programs that run one after the other do not see
the same card. Here every cache has its session, filled to the same depth, and at each depth they take
turns. Before and after a round of turns the companion is asked what a light reader gets. A round whose
answers differ by more than --drift, from each other or from the first at this depth, is thrown away and
taken again. The cache type stands behind =; without it the cache is as the file says.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/

from gpu.copied_rows import COPIED_FROM, Copies
from gpu.cuda import fill
from latentkv import _core
from latentkv.plan.master import planned

SKIPPED = 3  # steps of a turn: the first builds the graph, the second records it


def light_reader() -> Callable[[], float] | None:
    """GB/s that a light kernel reads now, by the companion; None: the program runs without it."""
    try:
        ask = ctypes.CDLL(None).consumer_light_gb_per_s
    except AttributeError:
        return None
    ask.restype = ctypes.c_double
    return lambda: float(ask())


class Cache:
    """A session that grows to the depths asked for."""

    def __init__(self, name: str, model: _core.Model, kv: str, n_ctx: int) -> None:
        self.name, self._n_vocab = name, model.n_vocab
        self._random = np.random.default_rng(1)
        self._session = _core.Session(model, n_ctx=n_ctx, **planned(model, {"kv": kv}))
        self._copies: Copies | None = None
        self._at = 0
        self.bytes_per_token = self._session.kv_bytes()["per_token"]

    def fill(self, depth: int) -> None:
        if depth >= COPIED_FROM:
            if self._copies is None:
                fill(self._session, self._random, self._n_vocab, self._at, COPIED_FROM)
                self._copies = Copies(self._session)
            self._copies.fill(depth)
        else:
            fill(self._session, self._random, self._n_vocab, self._at, depth)
        self._at = depth

    def turn(self, n: int) -> float:
        """Seconds of a step, the median of n behind those that prepare."""
        times = []
        for token in self._random.integers(0, self._n_vocab, n + SKIPPED).tolist():
            start = time.perf_counter()
            self._session.decode([token])
            times.append(time.perf_counter() - start)
        self._at += n + SKIPPED
        return statistics.median(times[SKIPPED:])

    def prompt(self, n: int) -> float:
        """Tokens/s of n tokens at once."""
        tokens = self._random.integers(0, self._n_vocab, n).tolist()
        start = time.perf_counter()
        self._session.decode(tokens, output="last")
        self._at += n
        return n / (time.perf_counter() - start)


def taken(caches: list[Cache], args: argparse.Namespace, light: Callable[[], float] | None) -> dict[str, Any]:
    """Of one depth: each cache's seconds a step by turns, and the light reader's GB/s around those kept."""
    seconds: dict[str, list[float]] = {cache.name: [] for cache in caches}
    lights: list[float] = []
    thrown = 0
    begin = time.monotonic()
    while len(seconds[caches[-1].name]) < args.turns and (
        not thrown or time.monotonic() - begin < args.patience
    ):
        before = light() if light else 0.0
        found = [(cache.name, cache.turn(args.steps)) for cache in caches]
        after = light() if light else 0.0
        around = [before, after, lights[0] if lights else before]
        if light and max(around) > (1 + args.drift) * min(around) and thrown < args.turns * 3:
            thrown += 1
            continue
        lights += [before, after] if light else []
        for name, t in found:
            seconds[name].append(t)
    return {"seconds": seconds, "light_gb_per_s": lights, "thrown": thrown}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("caches", nargs="+", metavar="MODEL.gguf[=KV]")
    parser.add_argument("--depths", default="0,16384,65536,131072")
    parser.add_argument("--turns", type=int, default=5, help="that each cache has at a depth")
    parser.add_argument("--steps", type=int, default=12, help="of a turn")
    parser.add_argument("--drift", type=float, default=0.1, help="of the light reader's bandwidth")
    parser.add_argument(
        "--patience", type=float, default=4.0, help="seconds of a depth where turns are thrown away"
    )
    parser.add_argument("--prefill", type=int, default=2048)
    parser.add_argument("--prefill-depth", type=int, default=16384)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    depths = [int(depth) for depth in args.depths.split(",")]
    asked = [cache.partition("=") for cache in args.caches]
    models = {path: _core.Model(path, n_gpu_layers=99) for path, _, _ in asked}
    room = (4 * args.turns + 1) * (args.steps + SKIPPED) + 3 * args.prefill + 256
    caches = [
        Cache(f"{Path(path).stem} {kv}".strip(), models[path], kv, max(depths) + room)
        for path, _, kv in asked
    ]
    light = light_reader()
    rows: list[dict[str, Any]] = []
    for depth in depths:
        for cache in caches:
            cache.fill(depth)
        found = taken(caches, args, light)
        first = found["seconds"][caches[0].name]
        for cache in caches:
            mine = found["seconds"][cache.name]
            row = {
                "cache": cache.name,
                "depth": depth,
                "decode_tps": 1.0 / statistics.median(mine) if mine else None,
                "of_first": statistics.median(a / b for a, b in zip(first, mine, strict=True))
                if mine
                else None,
                "bytes_per_token": cache.bytes_per_token,
                "ms": [1e3 * t for t in mine],
                "light_gb_per_s": found["light_gb_per_s"],
                "thrown": found["thrown"],
            }
            if depth == args.prefill_depth:
                row["prefill_tps"] = statistics.median(cache.prompt(args.prefill) for _ in range(3))
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
        if args.json:
            args.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
