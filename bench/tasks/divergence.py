"""What the caches of the tasks lose in nats, and how many hidden numbers they find.

    python bench/tasks/divergence.py MODEL [--device cuda] [-c 4096 --chunks 4] [--save NAME]

Files are converted as a user converts them. Products with quantized weights round activations to 8 bits, so
with them even f16 differs from itself in another batch; --weights f16 dequantizes them in memory, and so
measures the cache alone. Windows, text and hidden numbers are those of bench/ladder.py, which compares
methods.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/

import record
from inputs import real_models, texts
from ladder.cell import DEPTHS, SERVED, Job
from ladder.climb import last_line, search_path
from record import RESULTS, Column
from tasks.caches import Cache, caches, command

COLUMNS = [
    Column("cache", "cache"),
    Column("share", "of f16", ".1f", "%"),
    Column("kld", "mean KLD", ".5f"),
    Column("kld_se", "±", ".5f"),
    Column("kld_median", "median", ".5f"),
    Column("kld_p999", "99.9 %", ".3f"),
    Column("same_top", "same top", ".1f", "%"),
    Column("ppl", "perplexity", ".3f"),
    Column("found", "numbers found"),
]


def parser() -> argparse.ArgumentParser:
    made = command(__doc__)
    made.add_argument("-c", "--ctx-size", type=int, default=4096)
    made.add_argument("--chunks", type=int, default=4, help="windows, decoded together (default 4)")
    made.add_argument("--scored", type=int, default=0, help="tokens of a window (default: its second half)")
    made.add_argument("--samples", type=int, default=8, help="hidden numbers per depth (default 8)")
    made.add_argument(
        "--weights", choices=("stored", "f16", "f32"), default="stored", help="their type in memory"
    )
    made.add_argument("--jobs", type=int, default=1, help="caches beside each other")
    made.add_argument("--restart", action="store_true", help="forget finished caches")
    return made


class Measuring:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.model = args, real_models.model_path(args.model)
        name = args.name or real_models.stem(args.model)
        self.caches = caches(args.caches, self.model, args.work, name)
        if self.caches[0].name != "f16":
            raise SystemExit(f"error: [--caches] expected f16 first; got {self.caches[0].name}")
        self.folder: Path = args.work / f"{name}-divergence-{args.ctx_size}-{args.weights}"
        self.folder.mkdir(parents=True, exist_ok=True)
        _, self.text = texts.write(args.work / "texts")
        self.out: Path | None = args.out or (RESULTS / "tasks" / f"{args.save}.json" if args.save else None)
        self.command = command_line(args)
        self.rows = record.finished(self.out, self.command, args.restart) if self.out else []

    def run(self) -> int:
        """Status: 1 where a cache could not be measured."""
        reference, *others = self.caches
        rows = [self.row(reference)]
        print(self.keep(rows[0]), flush=True)
        done = {row["cache"] for row in self.rows}
        with futures.ThreadPoolExecutor(self.args.jobs) as beside:
            waiting = [beside.submit(self.row, each) for each in others if each.label not in done]
            for each in futures.as_completed(waiting):
                rows.append(each.result())
                print(self.keep(rows[-1]), flush=True)
        (self.folder / "reference.logits").unlink(missing_ok=True)
        return int(any("why" in row for row in rows))

    def row(self, cache: Cache) -> dict[str, Any]:
        cache.make(self.model, self.args.device)
        kv = dict(zip(cache.options[::2], cache.options[1::2], strict=True)).get("--kv")
        job = Job(
            file=str(cache.file),
            plain=str(self.model),
            folder=str(self.folder),
            text=str(self.text),
            options={"kv": kv} if kv else {},
            n_ctx=self.args.ctx_size,
            chunks=self.args.chunks,
            scored=self.args.scored,
            samples=self.args.samples,
            answers=0,
            again=self.args.chunks > 1,
            threads=self.args.threads,
            gpu_layers=99 if self.args.device == "cuda" else 0,
            weights=self.args.weights,
        )
        path = self.folder / f"{cache.name}.json"
        path.write_text(json.dumps(asdict(job)), encoding="utf-8")
        environment = os.environ | {"PYTHONPATH": search_path()}
        words = [sys.executable, "-m", "ladder.cell", str(path)]
        done = subprocess.run(words, capture_output=True, text=True, env=environment)
        empty = {"cache": cache.label} | dict.fromkeys(column.key for column in COLUMNS[1:])
        if done.returncode:
            return empty | {"why": last_line(done.stderr)}
        row = json.loads(done.stdout)
        row["share"], row["same_top"] = (
            None if row[key] is None else 100 * row[key] for key in ("share", "same_top")
        )
        if self.args.samples:
            row["found"] = round(sum(row.pop(f"found_{depth:.0%}") * self.args.samples for depth in DEPTHS))
        return empty | row

    def keep(self, row: dict[str, Any]) -> str:
        """Adds a row to the result; what it says."""
        if "why" in row:
            return f"{row['cache']}: {row['why']}"
        self.rows = [each for each in self.rows if each["cache"] != row["cache"]] + [row]
        order = [cache.label for cache in self.caches]
        self.rows.sort(key=lambda each: order.index(each["cache"]) if each["cache"] in order else len(order))
        if self.out:
            record.save(
                self.out, command=self.command, columns=COLUMNS, rows=self.rows, note=" ".join(self.note())
            )
        return ", ".join(f"{c.label} {record.cell(row[c.key], c.format)}" for c in COLUMNS)

    def note(self) -> Iterator[str]:
        args = self.args
        halves = f"the last {args.scored}" if args.scored else "second halves, behind the first as a prompt"
        weights = "its own weights" if args.weights == "stored" else f"weights in {args.weights}"
        yield (
            f"`{self.model.name}`, {weights}; the held-out text of `bench/inputs/texts.py` in {args.chunks} "
            f"windows of {args.ctx_size} tokens: {halves}, decoded token by token and scored. KLD in nats "
            f"per token against f16 rows. Bytes are those of {SERVED} tokens."
        )
        if args.chunks > 1:
            yield "The row of f16 is f16 with half as many windows at a time: how products round, no loss."
        if args.samples:
            yield f"Numbers: {len(DEPTHS) * args.samples} in texts of 6000 characters."
        if ran := next((row["ran"] for row in self.rows if "cuda" in row["ran"]), ""):
            yield f"Attention: {ran}."


def command_line(args: argparse.Namespace) -> str:
    """What a reader types in the root."""
    words = ["python", "bench/tasks/divergence.py", real_models.shown(args.model), "--device", args.device]
    words += ["-c", str(args.ctx_size), "--chunks", str(args.chunks), "--samples", str(args.samples)]
    words += ["--scored", str(args.scored)] if args.scored else []
    words += ["--weights", args.weights] if args.weights != "stored" else []
    words += ["--save", args.save] if args.save else []
    return shlex.join(words)


def main() -> int:
    args = parser().parse_args()
    try:
        return Measuring(args).run()
    except SystemExit as error:
        print(error.code, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
