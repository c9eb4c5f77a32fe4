"""What each part of `--kv-budget`'s plan is worth: the same budget with one part left out.

    python bench/lab/ablations.py CKPT_DIR --calib TEXT --text TEXT --save NAME

writes bench/results/NAME.json. Both preferences, decoded token by token as in bench/waterfill.py; the last
row reads the first one's file without its exact tokens.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/

import methods
import record
from answering.replay import Reference
from command import latentkv
from record import RESULTS, Column

PREFER = ("size", "speed")
COLUMNS = [
    Column("part", "left out"),
    Column("options", "options"),
    *[
        Column(f"{prefer}_{key}", f"{prefer}: {label}", form)
        for prefer in PREFER
        for key, label, form in (
            ("kld", "mean KLD", ".5f"),
            ("worse", "times the first row", ".2f"),
            ("p999", "99.9 %", ".3f"),
        )
    ],
]


@dataclass(frozen=True)
class Part:
    name: str
    convert: str = ""
    cache: tuple[tuple[str, int], ...] = ()


PARTS = (
    Part("nothing"),
    Part("the Hadamard rotation", "--no-rotate"),
    Part("balanced scaling", "--no-balance"),
    Part("Fisher weighting by direction", "--weight energy"),
    Part("one latent of K for all heads", "--group 1"),
    Part("one latent of V for all heads", "--group-v 1"),
    Part("exact sinks and recent tokens", cache=(("sink", 0), ("recent", 0))),
)


def measure(part: Part, prefer: str, reference: Reference, args: argparse.Namespace) -> dict[str, Any]:
    from latentkv import _core

    path: Path = args.out / f"{args.save}-{prefer}{part.convert.replace(' ', '')}.gguf"
    if not path.exists():
        words = [
            "--method",
            "waterfill",
            "--prefer",
            prefer,
            "--kv-budget",
            args.budget,
            *part.convert.split(),
        ]
        words += ["--calib", str(args.calib.resolve()), *shlex.split(args.convert)]
        latentkv("convert", str(args.checkpoint.resolve()), "-o", str(path.resolve()), "--no-plot", *words)
    result = methods.decoded(_core.Model(str(path)), {"kv": "", **dict(part.cache)}, reference, args)
    if part.convert:
        path.unlink()
    return {f"{prefer}_kld": result["kld"]["mean"], f"{prefer}_p999": result["kld"]["p999"]}


def run(args: argparse.Namespace) -> None:
    from latentkv import _core
    from latentkv.measure.perplexity import Cache

    args.out.mkdir(parents=True, exist_ok=True)
    result = RESULTS / f"{args.save}.json"
    command = command_line(args)
    rows = methods.finished(result, command, args.restart)
    plain = args.out / f"{args.save}-plain.gguf"
    if not plain.exists():
        latentkv("convert", str(args.checkpoint.resolve()), "-o", str(plain.resolve()), "--method", "none")
    cache = Cache(_core.Model(str(plain)), {"kv": "f16", "n_threads": args.threads})
    reference = Reference(cache, args.out / f"{args.save}.logits")
    for part in PARTS[len(rows) :]:
        row: dict[str, Any] = {"part": part.name, "options": f"`{part.convert}`" if part.convert else ""}
        for prefer in PREFER:
            row |= measure(part, prefer, reference, args)
            row[f"{prefer}_worse"] = row[f"{prefer}_kld"] / (rows or [row])[0][f"{prefer}_kld"]
        rows.append(row)
        print(" ".join(f"{c.label} {methods.cell(row[c.key], c.format)}" for c in COLUMNS), flush=True)
        record.save(result, command=command, columns=COLUMNS, rows=rows, note=note(args))
    reference.path.unlink(missing_ok=True)


def command_line(args: argparse.Namespace) -> str:
    """What a reader types in the root; what lies outside it by name."""
    words = [
        "python",
        "bench/lab/ablations.py",
        methods.shown(args.checkpoint),
        "--calib",
        methods.shown(args.calib),
    ]
    words += ["--text", methods.shown(args.text), "--save", args.save, "--budget", args.budget]
    words += ["-c", str(args.ctx_size), "--chunks", str(args.chunks), "--parallel", str(args.parallel)]
    return shlex.join(words + (["--convert", args.convert] if args.convert else []))


def note(args: argparse.Namespace) -> str:
    return (
        f"`{args.checkpoint.name}` at `--kv-budget {args.budget}`, `{args.text.name}` in windows of "
        f"{args.ctx_size} tokens, second halves scored, decoded token by token. KLD in nats per token "
        "against the uncompressed model with an f16 cache."
    )


def main() -> None:
    parser = methods.parser_of(__doc__, "build/ablations", 2048, 6)
    parser.add_argument("--budget", default="11%")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
