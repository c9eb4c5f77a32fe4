"""Fewer tokens or shorter rows: caches of equal true bytes with and without eviction.

    python bench/eviction.py MODEL --text TEXT --save NAME

MODEL is a name of bench/inputs/real_models.py, a GGUF or a checkpoint. A window is one prompt, which goes
through the cache in parts; KLD against full f16 rows of all tokens, in the second half. Writes
bench/results/NAME.json after every row; the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import methods
import record
from command import latentkv
from inputs import real_models
from record import RESULTS, Column

if TYPE_CHECKING:
    from latentkv.measure.windows import Windows

Logits = NDArray[np.float32]

COLUMNS = [
    Column("rows", "rows"),
    Column("evict", "eviction"),
    Column("keep_tokens", "tokens kept"),
    Column("share", "of f16", ".1%"),
    Column("kld", "mean KLD", ".4f"),
    Column("kld_se", "±", ".4f"),
    Column("same_top", "same top", ".1%"),
    Column("ppl", "perplexity", ".2f"),
]
LATENT = ("--method", "palu", "--group", "all", "--allocate", "uniform")


@dataclass(frozen=True)
class Cell:
    rows: str
    keep: float | None  # of the dimensions; None: full K and V
    kv: str
    evictions: tuple[tuple[str, str], ...]  # policy, --keep-tokens


def each(share: str) -> tuple[tuple[str, str], ...]:
    return tuple((policy, share) for policy in ("h2o", "snapkv", "keyformer"))


ALL = (("none", ""),)
# Those of 15 % or so, and one of 30 % that two of them come from.
CELLS = (
    Cell("half of the dimensions, q4", 0.5, "q4", ALL),
    Cell("72 % of the dimensions, q6", 0.72, "q6", (*ALL, ("h2o", "50%"), *each("42%"))),
    Cell("full, q2", None, "q2", ALL),
    Cell("full, q4", None, "q4", each("40%")[:2]),
)


def file_of(cell: Cell, args: argparse.Namespace) -> Path:
    name = "plain" if cell.keep is None else f"palu-{cell.keep:g}"
    path: Path = args.out / f"{args.save}-{name}.gguf"
    if not path.exists():
        words = ["--method", "none"] if cell.keep is None else [*LATENT, "--keep", f"{cell.keep:g}"]
        words += shlex.split(args.convert) if cell.keep is not None else []
        latentkv("convert", str(args.source), "-o", str(path.resolve()), "--no-plot", *words)
    return path


def logits(model: Any, windows: Windows, options: dict[str, Any]) -> tuple[dict[str, Any], list[Logits]]:
    """Bytes of the cache, and of every window the scored logits [n, n_vocab]; a window is one prompt."""
    from latentkv import _core

    n_ctx = windows.tokens.shape[1]
    session = _core.Session(model, n_ctx=n_ctx, **options)
    found = []
    for window in windows.tokens:
        session.clear()
        session.decode(window[: windows.first].tolist(), output="none")
        found.append(session.decode(window[windows.first : -1].tolist(), output="all"))
    return session.kv_bytes(), found


def measured(
    cell: Cell, evict: str, keep: str, windows: Windows, reference: list[Logits], args: argparse.Namespace
) -> dict[str, Any]:
    from latentkv import _core
    from latentkv.measure.divergence import concatenate, score, summary

    options = args.common | {"kv": cell.kv, "evict": evict, "keep_tokens": keep}
    model = _core.Model(str(file_of(cell, args)))
    begin = time.perf_counter()
    bytes_of, found = logits(model, windows, options)
    seconds = time.perf_counter() - begin
    targets = [window[windows.first + 1 :] for window in windows.tokens]
    result = summary(concatenate([score(*each) for each in zip(found, targets, reference, strict=True)]))
    full = model.forecast(args.ctx_size, kv="f16", sink=0, recent=0)
    return {
        "rows": cell.rows,
        "evict": evict,
        "keep_tokens": keep or "all",
        "share": bytes_of["total"] / (bytes_of["n_cells"] * bytes_of["f16_per_token"] + full["cells"]),
        "kld": result["kld"]["mean"],
        "kld_se": result["kld"]["mean_se"],
        "same_top": result["same_top"],
        "ppl": result["ppl"],
        "seconds": seconds,
    }


def referenced(plain: Any, args: argparse.Namespace) -> tuple[Windows, list[Logits]]:
    from latentkv.measure.windows import Windows, llama

    bos = plain.token_bos() if plain.add_bos() else None
    text = args.text.read_text(encoding="utf-8")
    windows = llama(plain.tokenize(text.encode(), True, False), args.ctx_size, bos)
    windows = Windows(windows.tokens[: args.chunks], windows.first)
    return windows, logits(plain, windows, args.common | {"kv": "f16"})[1]


def run(args: argparse.Namespace) -> None:
    from latentkv import _core

    args.out.mkdir(parents=True, exist_ok=True)
    result = RESULTS / f"{args.save}.json"
    command = command_line(args)
    rows = methods.finished(result, command, args.restart)
    windows, reference = referenced(_core.Model(str(file_of(CELLS[-1], args))), args)
    for cell in CELLS:
        for evict, keep in cell.evictions:
            done = {"rows": cell.rows, "evict": evict, "keep_tokens": keep or "all"}
            if any(done.items() <= row.items() for row in rows):
                continue
            rows.append(measured(cell, evict, keep, windows, reference, args))
            print(" ".join(f"{c.label} {rows[-1][c.key]}" for c in COLUMNS), flush=True)
            record.save(result, command=command, columns=COLUMNS, rows=rows, note=note(args))


def command_line(args: argparse.Namespace) -> str:
    words = ["python", "bench/eviction.py", methods.shown(Path(args.model))]
    words += ["--text", methods.shown(args.text), "--save", args.save, "-c", str(args.ctx_size)]
    words += ["--chunks", str(args.chunks)]
    return shlex.join(words + (["--convert", args.convert] if args.convert else []))


def note(args: argparse.Namespace) -> str:
    return (
        f"`{args.model}`, {args.chunks} prompts of {args.ctx_size} tokens from `{args.text.name}`, second "
        "halves scored; 4 sinks, no recent window. Latents are one for all KV heads of a layer. KLD in nats "
        "per token against full f16 rows of all tokens. Of f16: everything that is allocated for a prompt."
    )


def source_of(model: str) -> Path:
    return real_models.fetch(model) if model in real_models.MODELS else Path(model).resolve()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True, help="text to score")
    parser.add_argument("--save", required=True, metavar="NAME", help="result's name under bench/results")
    parser.add_argument("--out", type=Path, default=Path("build/eviction"), help="where GGUF files go")
    parser.add_argument("--convert", default="", help="more options for conversions to latents, in one word")
    parser.add_argument("-c", "--ctx-size", type=int, default=2048)
    parser.add_argument("--chunks", type=int, default=4, help="windows (default 4)")
    parser.add_argument("-t", "--threads", type=int, default=0)
    parser.add_argument("--restart", action="store_true", help="forget finished rows")
    args = parser.parse_args()
    args.source = source_of(args.model)
    args.common = {"sink": 4, "recent": 0, "n_threads": args.threads}
    run(args)


if __name__ == "__main__":
    main()
