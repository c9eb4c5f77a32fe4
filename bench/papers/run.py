"""Measures papers: every cache once, at all lengths that a claim names, beside full f16 rows."""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from command import arguments
from gpu import cuda
from inputs import random_model, random_rows
from inputs.random_shapes import SHAPES
from latentkv import _core
from papers.case import DEFAULT, FULL, QUANTITIES, Cache, Claim, Paper
from record import RESULTS, Column, save

PAPERS = ("palu", "zack", "lorc", "tale", "eigen")
STEPS, SKIPPED = 24, 4
COLUMNS = [
    Column("what", "cache"),
    Column("quantity", "figure"),
    Column("length", "tokens", ",.0f"),
    Column("batch", "sequences"),
    Column("claimed", "claimed"),
    Column("full", "full f16, ms or MiB", ".2f"),
    Column("found", "in kind", ".2f"),
    Column("gain", "its cache", ".2f", "x"),
    Column("default", "our default file", ".2f"),
    Column("default_gain", "default file", ".2f", "x"),
]


@dataclass(frozen=True)
class Measured:
    """Seconds and bytes of one cache at one length and batch."""

    empty: float  # a step on an empty cache
    step: float
    first: float  # a prompt of that length, of one sequence
    bytes: float

    def figure(self, quantity: str) -> float:
        """Milliseconds, or MiB."""
        if quantity == "bytes":
            return self.bytes / (1 << 20)
        return 1e3 * {"attention": self.step - self.empty, "step": self.step, "first": self.first}[quantity]


def measured(model: _core.Model, cache: Cache, lengths: Sequence[int], batch: int) -> dict[int, Measured]:
    """At every length, from one session that grows."""
    random = np.random.default_rng(1)
    exact = -1 if cache == DEFAULT else 0
    found = {}
    for length in sorted(lengths):
        n_ctx = batch * (length + STEPS + 256)
        session = _core.Session(
            model, n_ctx=n_ctx, n_seq_max=batch, kv_k=cache.kv_k, kv_v=cache.kv_v, sink=exact, recent=exact
        )
        where = session.implementations["latent_attn"]
        if "fused cuda" not in where:
            raise SystemExit(f"error: [papers] expected attention on a GPU; got {where}")
        empty = cuda.step_time(session, random, model.n_vocab, batch, STEPS, SKIPPED)
        assert all(session.seq_rm(seq, 0, -1) for seq in range(batch))
        first = []
        for seq in range(batch):
            start = time.perf_counter()
            for at in range(0, length, cuda.FILL):
                tokens = random.integers(0, model.n_vocab, min(cuda.FILL, length - at)).tolist()
                session.decode(tokens, seq=[seq] * len(tokens), output="last")
            first.append(time.perf_counter() - start)
        step = cuda.step_time(session, random, model.n_vocab, batch, STEPS, SKIPPED)
        found[length] = Measured(empty, step, min(first), session.kv_bytes()["total"])
        print(f"  {cache.name}, {batch} x {length}: {found[length]}", file=sys.stderr, flush=True)
        del session
    return found


def measure(paper: Paper, folder: Path) -> list[dict[str, Any]]:
    """A row a claim."""
    shape = SHAPES[paper.shape]
    shape = replace(shape, n_layer=paper.n_layer or shape.n_layer)
    batches = sorted({claim.batch for claim in paper.claims})
    found: dict[tuple[Cache, int, int], Measured] = {}
    for sides in dict.fromkeys([FULL.sides, DEFAULT.sides, *(claim.cache.sides for claim in paper.claims)]):
        path = folder / "model.gguf"
        share = sides.removesuffix("%")
        pair = (
            random_rows.planned(share, "speed", shape, random_rows.chosen_group(paper.shape))
            if share != sides
            else random_rows.sides_of(sides, shape)
        )
        random_model.write(shape, path, pair, sides, 1)
        model = _core.Model(str(path), n_gpu_layers=99)
        for batch in batches:
            here = [claim for claim in paper.claims if claim.batch == batch]
            caches = [cache for cache in {FULL, DEFAULT, *(c.cache for c in here)} if cache.sides == sides]
            for cache in caches:
                lengths = {claim.length for claim in here if cache in (FULL, DEFAULT, claim.cache)}
                try:
                    each = measured(model, cache, sorted(lengths), batch)
                except _core.Error as error:
                    print(f"  {cache.name}: {error}", file=sys.stderr, flush=True)
                    continue
                found |= {(cache, batch, length): one for length, one in each.items()}
        del model
        path.unlink()
    return [row_of(claim, found) for claim in paper.claims]


def row_of(claim: Claim, found: dict[tuple[Cache, int, int], Measured]) -> dict[str, Any]:
    full, own, default = (
        each.figure(claim.quantity) if (each := found.get((cache, claim.batch, claim.length))) else None
        for cache in (FULL, claim.cache, DEFAULT)
    )
    return {
        "what": claim.what,
        "quantity": QUANTITIES[claim.quantity],
        "length": claim.length,
        "batch": claim.batch,
        "claimed": claim.claimed,
        "full": full,
        "found": own,
        "gain": full and own and full / own,
        "default": default,
        "default_gain": full and default and full / default,
    }


def main(description: str | None) -> int:
    parser = arguments(description)
    parser.add_argument("papers", nargs="*", metavar="PAPER", help=f"of {', '.join(PAPERS)} (default: all)")
    parser.add_argument("--out", type=Path, default=RESULTS / "papers", help="folder of the results")
    args = parser.parse_args()
    if unknown := set(args.papers) - set(PAPERS):
        parser.error(f"[PAPER] expected some of {', '.join(PAPERS)}; got {', '.join(sorted(unknown))}")
    gpu = cuda.ask_gpu("name")
    for name in args.papers or PAPERS:
        paper: Paper = importlib.import_module(f"papers.{name}").PAPER
        with tempfile.TemporaryDirectory() as folder:
            rows = measure(paper, Path(folder))
        shape = SHAPES[paper.shape]
        layers = f", {paper.n_layer} layers" if paper.n_layer else ""
        note = f"{gpu}; {shape.name}'s shape{layers}, random Q4_0 weights; full f16 rows: flash decoding."
        command = f"python bench/papers.py {name}"
        save(args.out / f"papers-{name}.json", command=command, columns=COLUMNS, rows=rows, note=note)
        for row in rows:
            print(json.dumps(row), flush=True)
    return 0
