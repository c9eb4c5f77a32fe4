"""Methods at equal kept fractions and formats: true bytes, perplexity, divergence, retrieval, in decode mode.

    python bench/methods.py CKPT_DIR --calib TEXT --text TEXT --save NAME

writes bench/results/NAME.json and NAME.png. Tokens run one by one through the cache, as in generation; the
reference is the uncompressed model with an f16 cache, its logits computed once. Every finished row is kept:
run the same command again to go on after an interruption. A conversion that is refused leaves empty cells and
its reason in the JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import curves
import needles
import record
from answering.replay import Reference
from record import RESULTS, ROOT, Column

METHODS = ("palu", "zack", "zack --group all --basis kq-svd", "lorc", "eigen", "tale")
REFERENCES = ("f16", "q8_0", "q4_0")
COLUMNS = [
    Column("method", "method"),
    Column("keep", "`--keep`"),
    Column("kv", "`--kv`"),
    Column("bytes", "bytes per token", ",.0f"),
    Column("share", "of f16", ".1%"),
    Column("ppl", "perplexity", ".3f"),
    Column("kld", "mean KLD", ".5f"),
    Column("kld_p999", "99.9 %", ".3f"),
]
FOUND = Column("found", "numbers found", ".1%")


@dataclass(frozen=True)
class File:
    """One conversion and the caches to measure on it; kv "" is the file's own plan."""

    method: str  # with its options, as on the command line
    keep: float | None
    formats: tuple[str, ...]

    @property
    def options(self) -> list[str]:
        words = ["--method", *shlex.split(self.method)]
        return words if self.keep is None else [*words, "--keep", f"{self.keep:g}"]

    @property
    def name(self) -> str:
        return hashlib.sha256(shlex.join(self.options).encode()).hexdigest()[:12]


def files(args: argparse.Namespace) -> Iterator[File]:
    yield File("none", None, REFERENCES)
    for method in args.methods.split(","):
        for keep in args.keep.split(","):
            yield File(method.strip(), float(keep), tuple(args.kv.split(",")))
    for method in args.plan:
        yield File(method, None, ("",))


def convert(file: File, args: argparse.Namespace) -> tuple[Path, str]:
    """The GGUF, or why there is none."""
    path = args.out / f"{file.name}.gguf"
    if path.exists():
        return path, ""
    words = ["convert", str(args.checkpoint), "-o", str(path), "--no-plot", *file.options]
    if file.method != "none":
        words += ["--calib", str(args.calib), *shlex.split(args.convert)]
    print(f"\n$ latentkv {shlex.join(words)}", flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "latentkv", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines = done.stderr.strip().splitlines() or [""]
    if done.returncode not in (0, 2):
        raise SystemExit(done.stderr)
    return path, lines[-1] if done.returncode else ""


def decoded(
    model: Any, options: dict[str, Any], reference: Reference, args: argparse.Namespace
) -> dict[str, Any]:
    """The text scored token by token through a cache of these options, against the reference's logits."""
    from latentkv.measure.perplexity import Cache, perplexity

    result = perplexity(
        Cache(model, {**options, "n_threads": args.threads}),
        args.text.read_text(encoding="utf-8"),
        n_ctx=args.ctx_size,
        chunks=args.chunks,
        decode=True,
        parallel=args.parallel,
        against=reference,  # type: ignore[arg-type]
    )
    reference.keep()
    return result


def measure(path: Path, kv: str, reference: Reference, args: argparse.Namespace) -> dict[str, Any]:
    from latentkv import _core

    model = _core.Model(str(path))
    result = decoded(model, {"kv": kv}, reference, args)
    used = model.forecast(args.ctx_size, kv=kv)["total"] / args.ctx_size  # regions of exact tokens included
    row = {
        "bytes": used,
        "share": used / result["f16_bytes_per_token"],
        "ppl": result["ppl"],
        "kld": result["kld"]["mean"],
        "kld_p999": result["kld"]["p999"],
        "same_top": result["same_top"],
        "tokens": result["tokens"],
    }
    if args.needles:
        how = argparse.Namespace(ctx=0, sink=-1, recent=-1, threads=args.threads, forced=True)
        row["found"] = needles.run_gguf(str(path), kv, questions(args), how)["accuracy"]
    return row


def questions(args: argparse.Namespace) -> list[needles.Sample]:
    lines = args.needles.read_text(encoding="utf-8").splitlines()
    samples: list[needles.Sample] = [json.loads(line) for line in lines]
    return [sample for sample in samples if sample["length"] <= args.needles_length]


def empty(why: str, args: argparse.Namespace) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(("bytes", "share", "ppl", "kld", "kld_p999", "same_top", "tokens"))
    if args.needles:
        row["found"] = None
    return row | {"why": why}


def finished(path: Path, command: str, restart: bool) -> list[dict[str, Any]]:
    """Rows of an earlier run of the same command."""
    if restart or not path.exists():
        return []
    old = json.loads(path.read_text(encoding="utf-8"))
    if old["command"] != command:
        raise SystemExit(
            f"error: [--save] expected results of `{command}`; got those of `{old['command']}` in "
            f"{path.name}; choose another name or pass --restart"
        )
    rows: list[dict[str, Any]] = old["rows"]
    return rows


def run(args: argparse.Namespace) -> None:
    from latentkv import _core
    from latentkv.measure.perplexity import Cache

    args.out.mkdir(parents=True, exist_ok=True)
    result = RESULTS / f"{args.save}.json"
    command = command_line(args)
    rows = finished(result, command, args.restart)
    plain, why = convert(File("none", None, ()), args)
    if why:
        raise SystemExit(why)
    key = hashlib.sha256(f"{command}{args.text.read_text(encoding='utf-8')}".encode()).hexdigest()[:12]
    cache = Cache(_core.Model(str(plain)), {"kv": "f16", "n_threads": args.threads})
    reference = Reference(cache, args.out / f"{key}.logits")
    columns = [*COLUMNS, FOUND] if args.needles else COLUMNS
    for file in files(args):
        named = [{"method": file.method, "keep": file.keep, "kv": kv or "plan"} for kv in file.formats]
        missing = [name for name in named if not any(name.items() <= row.items() for row in rows)]
        if not missing:
            continue
        path, why = convert(file, args)
        if why:
            print(why, flush=True)
        for name in missing:
            kv = "" if name["kv"] == "plan" else str(name["kv"])
            row = name | (empty(why, args) if why else measure(path, kv, reference, args))
            rows.append(row)
            print(" ".join(f"{c.label} {cell(row[c.key], c.format)}" for c in columns), flush=True)
            record.save(result, command=command, columns=columns, rows=rows, note=note(args))
        if path != plain and not args.keep_files:
            path.unlink(missing_ok=True)
            path.with_suffix(".report.json").unlink(missing_ok=True)
    curves.draw(
        rows, result.with_suffix(".png"), f"{args.checkpoint.name}, decoded at {args.ctx_size} tokens"
    )
    reference.path.unlink(missing_ok=True)


def cell(value: Any, spec: str) -> str:
    return "–" if value is None else format(value, spec)


def command_line(args: argparse.Namespace) -> str:
    """What a reader types in the root; what lies outside it by name."""
    words = ["python", "bench/methods.py", shown(args.checkpoint), "--calib", shown(args.calib)]
    words += ["--text", shown(args.text), "--save", args.save, "-c", str(args.ctx_size)]
    words += ["--chunks", str(args.chunks), "--parallel", str(args.parallel)]
    words += ["--methods", args.methods, "--keep", args.keep, "--kv", args.kv]
    words += [word for method in args.plan for word in ("--plan", method)]
    words += ["--convert", args.convert] if args.convert else []
    if args.needles:
        words += ["--needles", shown(args.needles)]
        words += ["--needles-length", str(args.needles_length)]
    return shlex.join(words)


def shown(path: Path) -> str:
    path = path.resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


def note(args: argparse.Namespace) -> str:
    return (
        f"`{args.checkpoint.name}`, `{args.text.name}` in windows of {args.ctx_size} tokens, second halves "
        "scored, decoded token by token. KLD in nats per token against the uncompressed model with an f16 "
        "cache. Bytes are all that is allocated for one such window, sinks and recent tokens included."
    )


def parser_of(doc: str | None, out: str, ctx_size: int, windows: int) -> argparse.ArgumentParser:
    """Of a command that converts a checkpoint in several ways and scores a text with each."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("checkpoint", type=Path)
    add("--calib", type=Path, required=True, help="text to calibrate on")
    add("--text", type=Path, required=True, help="text to score")
    add("--save", required=True, metavar="NAME", help="result's name under bench/results")
    add("--out", type=Path, default=Path(out), help="where GGUF files go")
    add("--convert", default="", help="more options for every conversion, in one word")
    add("-c", "--ctx-size", type=int, default=ctx_size)
    add("--chunks", type=int, default=windows, help=f"windows (default {windows})")
    add("--parallel", type=int, default=windows, help=f"windows that decode together (default {windows})")
    add("-t", "--threads", type=int, default=0)
    add("--restart", action="store_true", help="forget finished rows")
    return parser


def main() -> None:
    parser = parser_of(__doc__, "build/methods", 1024, 8)
    parser.add_argument("--methods", default=",".join(METHODS), help="comma separated, each with its options")
    parser.add_argument(
        "--plan",
        action="append",
        default=[],
        metavar="METHOD",
        help="a method with options whose file brings its own formats; measured as it is",
    )
    parser.add_argument("--keep", default="0.7,0.5,0.3")
    parser.add_argument("--kv", default="f16,q4,q3")
    parser.add_argument("--needles", type=Path, help="also count numbers found (bench/needles.py)")
    parser.add_argument(
        "--needles-length",
        type=int,
        default=1000,
        metavar="N",
        help="only texts of up to N tokens (default 1000)",
    )
    parser.add_argument("--keep-files", action="store_true", help="do not delete measured GGUF files")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
