"""Decode from several caches in turn, in one process: the first, the second, the first again, …

    python bench/gpu/consumer.py rtx4090 -- python bench/gpu/beside.py 8b.gguf=f16 8b-14.gguf --depths 0,16384

Here every cache has its session, filled to the same depth, and at each depth they take turns. Before a round
of turns the companion steers its readers until a light reader gets the card's bandwidth; behind it, it is
asked again. A round is thrown away, and taken again, where an answer is further than --drift from the card's
or the multiprocessors' clock moved by more. The cache type stands behind =; without it the cache is as the
file says.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/

from command import arguments
from gpu.copied_rows import COPIED_FROM, Copies
from gpu.cuda import ask_gpu, fill, step_times
from latentkv import _core
from latentkv.plan.master import planned

SKIPPED = 3  # steps of a turn: the first builds the graph, the second records it


class Companion:
    """What the companion (consumer.py) leaves to a program, in GB/s, and the clock."""

    def __init__(self, library: Any, wanted: float) -> None:
        self._library, self.wanted = library, wanted
        library.consumer_light_gb_per_s.restype = ctypes.c_double
        library.consumer_sm_mhz.restype = ctypes.c_double

    @classmethod
    def here(cls) -> Companion | None:
        """None: the program runs without it, or without readers."""
        library = ctypes.CDLL(None)
        if not hasattr(library, "consumer_light_gb_per_s") or "CONSUMER_NO_READERS" in os.environ:
            return None
        return cls(library, float(os.environ["CONSUMER_GB_PER_S"]))

    def light(self, steer: bool) -> float:
        """What a light reader gets now; steer: after readers were steered to what is wanted."""
        return float(self._library.consumer_light_gb_per_s(int(steer)))

    def mhz(self) -> float:
        return float(self._library.consumer_sm_mhz())


@dataclass
class Around:
    """What was found before and behind the rounds that were kept."""

    light_gb_per_s: list[float] = field(default_factory=list)
    sm_mhz: list[float] = field(default_factory=list)
    thrown: int = 0
    thrown_light: list[float] = field(default_factory=list)

    def keeps(self, light: list[float], mhz: list[float], wanted: float, drift: float) -> bool:
        """Whether the round between two answers counts; it is remembered."""
        clocks = [*mhz, *self.sm_mhz[:1]]
        near = all(abs(each - wanted) <= drift * wanted for each in light)
        if not near or max(clocks) > (1 + drift) * min(clocks):
            self.thrown += 1
            self.thrown_light += light
            return False
        self.light_gb_per_s += light
        self.sm_mhz += mhz
        return True


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
        times = step_times(self._session, self._random, self._n_vocab, [0], n + SKIPPED, SKIPPED)
        self._at += n + SKIPPED
        return statistics.median(times)

    def prompt(self, n: int) -> float:
        """Tokens/s of n tokens at once."""
        tokens = self._random.integers(0, self._n_vocab, n).tolist()
        start = time.perf_counter()
        self._session.decode(tokens, output="last")
        self._at += n
        return n / (time.perf_counter() - start)


def taken(
    caches: list[Cache], args: argparse.Namespace, companion: Companion | None
) -> tuple[dict[str, list[float]], Around]:
    """At one depth: each cache's seconds a step by turns, and what the companion said around those kept."""
    seconds: dict[str, list[float]] = {cache.name: [] for cache in caches}
    around = Around()
    begin = time.monotonic()
    while len(seconds[caches[-1].name]) < args.turns:
        if around.thrown and time.monotonic() - begin > args.patience:
            break
        if companion is None:
            for cache in caches:
                seconds[cache.name].append(cache.turn(args.steps))
            continue
        light, mhz = [companion.light(steer=True)], [companion.mhz()]
        found = [(cache.name, cache.turn(args.steps)) for cache in caches]
        light.append(companion.light(steer=False))
        mhz.append(companion.mhz())
        if around.keeps(light, mhz, companion.wanted, args.drift):
            for name, each in found:
                seconds[name].append(each)
    return seconds, around


def prompts(cache: Cache, n: int, companion: Companion | None) -> float:
    """Tokens/s of a prompt of n tokens, the median of three."""
    if companion:
        companion.light(steer=True)
    return statistics.median(cache.prompt(n) for _ in range(3))


def rows_at(
    depth: int, caches: list[Cache], args: argparse.Namespace, companion: Companion | None
) -> Iterator[dict[str, Any]]:
    """One row a cache; the first is what others are compared with, turn by turn."""
    seconds, around = taken(caches, args, companion)
    first = seconds[caches[0].name]
    for cache in caches:
        mine = seconds[cache.name]
        pairs = zip(first, mine, strict=True)
        row = {
            "cache": cache.name,
            "depth": depth,
            "decode_tps": 1.0 / statistics.median(mine) if mine else None,
            "of_first": statistics.median(a / b for a, b in pairs) if mine else None,
            "bytes_per_token": cache.bytes_per_token,
            "ms": [1e3 * t for t in mine],
            **asdict(around),
        }
        if depth == args.prefill_depth:
            row["prefill_tps"] = prompts(cache, args.prefill, companion)
        yield row


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("caches", nargs="+", metavar="MODEL.gguf[=KV]")
    parser.add_argument("--depths", default="0,16384,65536,131072")
    parser.add_argument("--turns", type=int, default=5, help="that each cache has at a depth")
    parser.add_argument("--steps", type=int, default=12, help="of a turn")
    parser.add_argument(
        "--drift", type=float, default=0.1, help="of bandwidth from the card's, and of clocks"
    )
    parser.add_argument(
        "--patience", type=float, default=8.0, help="seconds of a depth where turns are thrown away"
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
    companion = Companion.here()
    rows: list[dict[str, Any]] = []
    for depth in depths:
        for cache in caches:
            cache.fill(depth)
        for row in rows_at(depth, caches, args, companion):
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
        if args.json:
            found = {"gpu": ask_gpu("name"), "prefill": args.prefill, "rows": rows}
            args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
