"""What `--kv-budget` buys on a model, expected and measured, beside stock caches and the published methods.

    python bench/waterfill.py CKPT_DIR --calib TEXT --text TEXT --save NAME

writes bench/results/NAME.json, NAME.png (divergence over bytes) and NAME-bits.png (bits of every channel).
Windows are decoded token by token, as in generation; the reference is the uncompressed model with an f16
cache, its logits computed once. Every finished row is kept: run the same command again to go on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import curves
import methods
import needles
import record
from answering.replay import Reference
from command import latentkv
from record import RESULTS, Column

COLUMNS = [
    Column("recipe", "recipe"),
    Column("rows", "budget or rows"),
    Column("share", "of f16", ".2%"),
    Column("forecast", "expected KLD", ".5f"),
    Column("kld", "mean KLD", ".5f"),
    Column("kld_se", "±", ".5f"),
    Column("kld_p999", "99.9 %", ".4f"),
    Column("same_top", "same top token", ".2%"),
]
FOUND = Column("found", "numbers found")
SERVED = 32768  # tokens at which whole caches are compared
# a method with its options, a colon, the rows it is read with; `+N`: the last N tokens and the first 4 exact
PUBLISHED = (
    "palu --group all --keep 0.7:q4 q4+128",
    "palu --group all --keep 0.5:q4 q4+128",
    "palu --group all --keep 0.3:q4",
    "eigen --keep 0.7:q4",
    "eigen --keep 0.5:q4",
    "zack --group all --basis kq-svd --keep 0.7:q4",
    "zack --group all --basis kq-svd --keep 0.5:q4",
    "lorc --keep 0.7:q4",
    "tale --keep 0.75 --kv-recent f16:q4",
)


@dataclass(frozen=True)
class Row:
    """One cache to measure: what is converted, and how its rows are kept (a budget is in the file)."""

    recipe: str  # `none`, `speed`, `size`, or a published method with its options
    rows: str  # a budget, or row formats as in PUBLISHED

    @property
    def planned(self) -> bool:
        return self.recipe in ("speed", "size")

    def cache(self) -> dict[str, Any]:
        """Options of the cache."""
        if self.planned:
            return {"kv": ""}
        kv, _, recent = self.rows.partition("+")
        return {"kv": kv} | ({"sink": 4, "recent": int(recent)} if recent else {})

    def convert(self, args: argparse.Namespace) -> list[str]:
        if self.recipe == "none":
            return ["--method", "none"]
        words = ["--method", *shlex.split(self.recipe)]
        if self.planned:
            words = ["--method", "waterfill", "--prefer", self.recipe, "--kv-budget", self.rows]
        return [*words, "--calib", str(args.calib.resolve()), *shlex.split(args.convert)]

    def file(self, args: argparse.Namespace) -> Path:
        name = "plain" if self.recipe == "none" else hashlib.sha256(self.recipe.encode()).hexdigest()[:12]
        if self.planned:
            name = f"{self.recipe}-{self.rows.replace('%', '').replace('@', '-')}"
        path: Path = args.out / f"{args.save}-{name}.gguf"
        return path


def rows_wanted(args: argparse.Namespace) -> Iterator[Row]:
    """Stock cache types of full K and V, then the budgets, then what was published."""
    yield from (Row("none", kv) for kv in args.stock.split(",") if kv)
    for budget in args.budgets.split(","):
        yield from (Row(prefer, budget) for prefer in args.prefer.split(","))
    for published in args.published:
        recipe, _, formats = published.partition(":")
        yield from (Row(recipe, kv) for kv in formats.split())


def convert(row: Row, args: argparse.Namespace) -> Path:
    """The GGUF, with the converter's report and picture beside it."""
    path = row.file(args)
    if not path.exists():
        latentkv("convert", str(args.checkpoint.resolve()), "-o", str(path.resolve()), *row.convert(args))
    return path


def measure(path: Path, row: Row, reference: Reference, args: argparse.Namespace) -> dict[str, Any]:
    from latentkv import _core

    model = _core.Model(str(path))
    result = methods.decoded(model, row.cache(), reference, args)
    size = model.forecast(SERVED, **row.cache())["total"]
    full = model.forecast(SERVED, kv="f16", sink=0, recent=0)
    return {
        "share": size / (SERVED * full["f16_per_token"] + full["cells"]),
        "kld": result["kld"]["mean"],
        "kld_se": result["kld"]["mean_se"],
        "kld_p999": result["kld"]["p999"],
        "same_top": result["same_top"],
        "tokens": result["tokens"],
        "forecast": model.metadata.get("latentkv.predicted_kld"),
    }


def found(path: Path, row: Row, args: argparse.Namespace) -> str | None:
    """Numbers found in long texts (bench/needles.py): stock caches and the first budget only."""
    if not args.needles or row.rows not in (*args.stock.split(","), args.budgets.split(",")[0]):
        return None
    samples = [json.loads(line) for line in args.needles.read_text(encoding="utf-8").splitlines()]
    how = argparse.Namespace(ctx=0, sink=-1, recent=-1, threads=args.threads, forced=True)
    result = needles.run_gguf(str(path), row.cache()["kv"], samples, how)
    return f"{result['hits']} of {result['samples']}"


def run(args: argparse.Namespace) -> None:
    from latentkv import _core
    from latentkv.measure.perplexity import Cache

    args.out.mkdir(parents=True, exist_ok=True)
    result = RESULTS / f"{args.save}.json"
    command = command_line(args)
    rows = methods.finished(result, command, args.restart)
    plain = convert(Row("none", "f16"), args)
    cache = Cache(_core.Model(str(plain)), {"kv": "f16", "n_threads": args.threads})
    reference = Reference(cache, args.out / f"{args.save}.logits")
    columns = [*COLUMNS, FOUND] if args.needles else COLUMNS
    for row in rows_wanted(args):
        name = {"recipe": row.recipe, "rows": row.rows}
        if any(name.items() <= made.items() for made in rows):
            continue
        path = convert(row, args)
        rows.append(name | measure(path, row, reference, args) | {"found": found(path, row, args)})
        print(" ".join(f"{c.label} {methods.cell(rows[-1][c.key], c.format)}" for c in columns), flush=True)
        record.save(result, command=command, columns=columns, rows=rows, note=note(args))
    curves.draw(
        [made | {"method": family(made["recipe"])} for made in rows],
        result.with_suffix(".png"),
        f"{args.checkpoint.name}, decoded at {args.ctx_size} tokens",
    )
    first = convert(Row(args.prefer.split(",")[0], args.budgets.split(",")[0]), args)
    shutil.copyfile(first.with_suffix(".ranks.png"), RESULTS / f"{args.save}-bits.png")
    reference.path.unlink(missing_ok=True)


def family(recipe: str) -> str:
    """One curve per method: `palu --group all --keep 0.5` is `palu`."""
    return f"waterfill, {recipe}" if recipe in ("speed", "size") else recipe.split()[0]


def command_line(args: argparse.Namespace) -> str:
    """What a reader types in the root; what lies outside it by name."""
    words = ["python", "bench/waterfill.py", methods.shown(args.checkpoint)]
    words += ["--calib", methods.shown(args.calib), "--text", methods.shown(args.text), "--save", args.save]
    words += ["--budgets", args.budgets, "--prefer", args.prefer, "--stock", args.stock]
    words += ["-c", str(args.ctx_size), "--chunks", str(args.chunks), "--parallel", str(args.parallel)]
    if args.published != list(PUBLISHED):
        words += [word for one in args.published or [""] for word in ("--published", one)]
    words += ["--needles", methods.shown(args.needles)] if args.needles else []
    return shlex.join(words + (["--convert", args.convert] if args.convert else []))


def note(args: argparse.Namespace) -> str:
    return (
        f"`{args.checkpoint.name}`, `{args.text.name}` in windows of {args.ctx_size} tokens, second halves "
        "scored, decoded token by token. KLD in nats per token against the uncompressed model with an f16 "
        f"cache. Of f16: everything that is allocated for {SERVED} tokens, over the f16 cache. `+128`: the "
        "last 128 tokens and the first 4 exact, as with a budget."
    )


def main() -> None:
    parser = methods.parser_of(__doc__, "build/waterfill", 2048, 6)
    parser.add_argument("--budgets", default="14%,28%,17.5%,11%,8.5%", help="the first one's bits are drawn")
    parser.add_argument("--prefer", default="speed,size")
    parser.add_argument("--stock", default="f16,q8_0,q4_0", help="cache types of full K and V")
    parser.add_argument(
        "--published",
        action="append",
        metavar="METHOD:ROWS",
        help='a method with its options and rows to read it with, "" for none (default: the best of each)',
    )
    parser.add_argument("--needles", type=Path, help="also count numbers found (bench/needles.py)")
    args = parser.parse_args()
    args.published = list(PUBLISHED) if args.published is None else [one for one in args.published if one]
    run(args)


if __name__ == "__main__":
    main()
