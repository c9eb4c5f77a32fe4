"""What `--kv-budget` buys on a model, expected and measured, per budget and preference, with plots.

    python bench/waterfill.py CKPT_DIR --calib TEXT --text TEXT --save NAME

writes bench/results/NAME.json, NAME.png (divergence over bytes) and NAME-bits.png (bits of every channel).
Windows are decoded token by token, as in generation; the reference is the uncompressed model with an f16
cache, its logits computed once. Every finished row is kept: run the same command again to go on.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
from pathlib import Path
from typing import Any

import curves
import methods
import record
from command import latentkv
from record import RESULTS, Column
from replay import Reference

COLUMNS = [
    Column("prefer", "`--prefer`"),
    Column("budget", "`--kv-budget`"),
    Column("share", "of f16", ".2%"),
    Column("forecast", "expected KLD", ".5f"),
    Column("kld", "mean KLD", ".5f"),
    Column("kld_se", "±", ".5f"),
    Column("kld_p999", "99.9 %", ".4f"),
    Column("same_top", "same top token", ".2%"),
]
SERVED = 32768  # tokens at which whole caches are compared


def rows_wanted(args: argparse.Namespace) -> list[tuple[str, str]]:
    """(prefer, budget); stock cache types first, as prefer `none`."""
    stock = [("none", kv) for kv in args.stock.split(",") if kv]
    return stock + [
        (prefer, budget) for budget in args.budgets.split(",") for prefer in args.prefer.split(",")
    ]


def convert(prefer: str, budget: str, args: argparse.Namespace) -> Path:
    """The GGUF, with the converter's report and picture beside it."""
    name = "plain" if prefer == "none" else f"{prefer}-{budget.replace('%', '').replace('@', '-')}"
    path: Path = args.out / f"{args.save}-{name}.gguf"
    if not path.exists():
        options = ["--method", "none"]
        if prefer != "none":
            options = ["--method", "waterfill", "--prefer", prefer, "--kv-budget", budget]
            options += ["--calib", str(args.calib.resolve()), *shlex.split(args.convert)]
        latentkv("convert", str(args.checkpoint.resolve()), "-o", str(path.resolve()), *options)
    return path


def measure(path: Path, kv: str, reference: Reference, args: argparse.Namespace) -> dict[str, Any]:
    from latentkv import _core

    model = _core.Model(str(path))
    result = methods.decoded(model, kv, reference, args)
    size = model.forecast(SERVED, kv=kv)["total"]
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


def run(args: argparse.Namespace) -> None:
    from latentkv import _core
    from latentkv.perplexity import Cache

    args.out.mkdir(parents=True, exist_ok=True)
    result = RESULTS / f"{args.save}.json"
    command = command_line(args)
    rows = methods.finished(result, command, args.restart)
    plain = convert("none", "", args)
    cache = Cache(_core.Model(str(plain)), {"kv": "f16", "n_threads": args.threads})
    reference = Reference(cache, args.out / f"{args.save}.logits")
    for prefer, budget in rows_wanted(args):
        if any(row["prefer"] == prefer and row["budget"] == budget for row in rows):
            continue
        path = convert(prefer, budget, args)
        kv = budget if prefer == "none" else ""  # a stock type, or the file's plan
        rows.append({"prefer": prefer, "budget": budget} | measure(path, kv, reference, args))
        print(" ".join(f"{c.label} {methods.cell(rows[-1][c.key], c.format)}" for c in COLUMNS), flush=True)
        record.save(result, command=command, columns=COLUMNS, rows=rows, note=note(args))
    curves.draw(
        [row | {"method": row["prefer"]} for row in rows],
        result.with_suffix(".png"),
        f"{args.checkpoint.name}, decoded at {args.ctx_size} tokens",
    )
    first = convert(args.prefer.split(",")[0], args.budgets.split(",")[0], args)
    shutil.copyfile(first.with_suffix(".ranks.png"), RESULTS / f"{args.save}-bits.png")
    reference.path.unlink(missing_ok=True)


def command_line(args: argparse.Namespace) -> str:
    """What a reader types in the root; what lies outside it by name."""
    words = ["python", "bench/waterfill.py", methods.shown(args.checkpoint)]
    words += ["--calib", methods.shown(args.calib), "--text", methods.shown(args.text), "--save", args.save]
    words += ["--budgets", args.budgets, "--prefer", args.prefer, "--stock", args.stock]
    words += ["-c", str(args.ctx_size), "--chunks", str(args.chunks), "--parallel", str(args.parallel)]
    return shlex.join(words + (["--convert", args.convert] if args.convert else []))


def note(args: argparse.Namespace) -> str:
    return (
        f"`{args.checkpoint.name}`, `{args.text.name}` in windows of {args.ctx_size} tokens, second halves "
        "scored, decoded token by token. KLD in nats per token against the uncompressed model with an f16 "
        f"cache. Share: everything that is allocated for {SERVED} tokens, over the f16 cache."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--calib", type=Path, required=True, help="text to calibrate on")
    parser.add_argument("--text", type=Path, required=True, help="text to score")
    parser.add_argument("--save", required=True, metavar="NAME", help="result's name under bench/results")
    parser.add_argument("--out", type=Path, default=Path("build/waterfill"), help="where GGUF files go")
    parser.add_argument("--budgets", default="14%,28%,17.5%,11%,8.5%", help="the first one's bits are drawn")
    parser.add_argument("--prefer", default="speed,size")
    parser.add_argument("--stock", default="q8_0,q4_0", help="cache types of full K and V to compare with")
    parser.add_argument("--convert", default="", help="more options for every conversion, in one word")
    parser.add_argument("-c", "--ctx-size", type=int, default=2048)
    parser.add_argument("--chunks", type=int, default=6, help="windows (default 6)")
    parser.add_argument("--parallel", type=int, default=6, help="windows that decode together (default 6)")
    parser.add_argument("-t", "--threads", type=int, default=0)
    parser.add_argument("--restart", action="store_true", help="forget finished rows")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
