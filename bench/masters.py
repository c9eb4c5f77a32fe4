"""What one master file loses, planned for many budgets when it is opened, against a file per budget.

    python bench/masters.py CKPT_DIR --calib TEXT --text TEXT --save NAME --direct RESULT

writes bench/results/NAME.json. RESULT is bench/waterfill.py's result on the same model, text and windows; its
rows of planned files are the files per budget.
"""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

import methods
import record
from answering.replay import Reference
from command import latentkv
from record import RESULTS, Column
from waterfill import SERVED

COLUMNS = [
    Column("prefer", "master file"),
    Column("budget", "`--kv-budget`"),
    Column("share", "of f16", ".2%"),
    Column("forecast", "expected KLD", ".6f"),
    Column("kld", "mean KLD", ".6f"),
    Column("kld_se", "±", ".6f"),
    Column("direct", "file per budget", ".6f"),
]


def convert(prefer: str, args: argparse.Namespace) -> Path:
    path: Path = args.out / f"{args.save}-{prefer}.gguf"
    if not path.exists():
        words = [
            "--method",
            "waterfill",
            "--master",
            "--prefer",
            prefer,
            "--calib",
            str(args.calib.resolve()),
        ]
        words += ["--no-plot", *shlex.split(args.convert)]
        latentkv("convert", str(args.checkpoint.resolve()), "-o", str(path.resolve()), *words)
    return path


def measure(path: Path, budget: str, reference: Reference, args: argparse.Namespace) -> dict[str, Any]:
    from latentkv import _core
    from latentkv.plan.master import choose

    model = _core.Model(str(path))
    chosen = choose(model, budget)
    result = methods.decoded(model, {"kv_budget": budget}, reference, args)
    size = model.forecast(SERVED, **chosen.options())["total"]
    full = model.forecast(SERVED, kv="f16", sink=0, recent=0)
    return {
        "share": size / (SERVED * full["f16_per_token"] + full["cells"]),
        "forecast": chosen.kld,
        "kld": result["kld"]["mean"],
        "kld_se": result["kld"]["mean_se"],
    }


def run(args: argparse.Namespace) -> None:
    from latentkv import _core
    from latentkv.measure.perplexity import Cache

    args.out.mkdir(parents=True, exist_ok=True)
    result = RESULTS / f"{args.save}.json"
    command = command_line(args)
    rows = methods.finished(result, command, args.restart)
    direct = {
        (row["recipe"], row["rows"]): row["kld"]
        for row in json.loads(args.direct.read_text(encoding="utf-8"))["rows"]
    }
    plain = args.out / f"{args.save}-plain.gguf"
    if not plain.exists():
        latentkv("convert", str(args.checkpoint.resolve()), "-o", str(plain.resolve()), "--method", "none")
    cache = Cache(_core.Model(str(plain)), {"kv": "f16", "n_threads": args.threads})
    reference = Reference(cache, args.out / f"{args.save}.logits")
    for name in wanted(args):
        if not any(name.items() <= row.items() for row in rows):
            rows.append(name | measure(convert(name["prefer"], args), name["budget"], reference, args))
            print(" ".join(f"{c.label} {rows[-1].get(c.key)}" for c in COLUMNS), flush=True)
        rows = [row | {"direct": direct.get((row["prefer"], row["budget"]))} for row in rows]
        record.save(result, command=command, columns=COLUMNS, rows=rows, note=note(args))
    reference.path.unlink(missing_ok=True)


def wanted(args: argparse.Namespace) -> list[dict[str, str]]:
    sides = [(prefer, budget) for prefer in args.prefer.split(",") for budget in args.budgets.split(",")]
    return [{"prefer": prefer, "budget": budget} for prefer, budget in sides]


def command_line(args: argparse.Namespace) -> str:
    """What a reader types in the root; what lies outside it by name."""
    words = ["python", "bench/masters.py", methods.shown(args.checkpoint)]
    words += ["--calib", methods.shown(args.calib), "--text", methods.shown(args.text), "--save", args.save]
    words += ["--direct", f"bench/results/{args.direct.name}", "--budgets", args.budgets]
    words += ["--prefer", args.prefer, "-c", str(args.ctx_size)]
    words += ["--chunks", str(args.chunks), "--parallel", str(args.parallel)]
    return shlex.join(words + (["--convert", args.convert] if args.convert else []))


def note(args: argparse.Namespace) -> str:
    return (
        f"`{args.checkpoint.name}`, one file per preference, converted at 14 %; `{args.text.name}` in "
        f"windows of {args.ctx_size} tokens, second halves scored, decoded token by token. KLD in nats per "
        "token against the uncompressed model with an f16 cache. Of f16: everything that is allocated for "
        f"{SERVED} tokens."
    )


def main() -> None:
    parser = methods.parser_of(__doc__, "build/masters", 2048, 6)
    parser.add_argument("--direct", type=Path, required=True, help="JSON of bench/waterfill.py")
    parser.add_argument("--budgets", default="28%,14%,11%,8.5%")
    parser.add_argument("--prefer", default="speed,size")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
