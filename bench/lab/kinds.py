"""What a file that was calibrated on one kind of text loses on each other kind.

    python bench/lab/kinds.py MODEL [--device cuda]

MODEL is a name of bench/inputs/real_models.py or a GGUF. Texts are those of the converter's default mix
(calibrate/text/mix.py): a file per kind, one for all of them in turns, and that one again with --quick. It is
measured on the held-out part of every kind, and by numbers hidden in prose. Every file's row is written to
bench/results/kinds-NAME.json when it is measured; the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/

import needles
import record
from answering import answers, decoded
from command import arguments, latentkv
from inputs import hide, real_models
from latentkv_convert.calibrate.text import chats, mix
from latentkv_convert.source.open_source import open_source
from record import RESULTS, Column

QUICK = "all, --quick"
CALIBRATED_ON = (*mix.KINDS, "all", QUICK)
DEPTHS = (0.1, 0.5, 0.9)
COLUMNS = [
    Column("on", "calibrated on"),
    *[Column(f"kld_{kind}", f"KLD, {kind}", ".5f") for kind in mix.KINDS],
    Column("mean", "mean KLD", ".5f"),
    Column("worst", "largest, of the smallest in its column", ".2f"),
    Column("found", "numbers found", ".0%"),
    Column("seconds", "conversion, s", ".0f"),
]


class Kinds:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.name, self.model = real_models.stem(args.model), real_models.model_path(args.model).resolve()
        self.folder: Path = (args.work / self.name).resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        render = chats.renderer(open_source(self.model))
        self.calib = {kind: mix.text(render, [kind]) for kind in mix.KINDS} | {"all": mix.text(render)}
        self.held_out = {kind: mix.text(render, [kind], mix.HELD_OUT) for kind in mix.KINDS}
        self.layers = 99 if args.device == "cuda" else 0

    def convert(self, on: str) -> tuple[Path, float]:
        """The file, and the seconds it took."""
        stem = on.replace(", --", "-")
        path, text = self.folder / f"{stem}.gguf", self.folder / f"{stem}.txt"
        text.write_text(self.calib["all" if on == QUICK else on], encoding="utf-8")
        words = ["--calib", str(text), "--kv-budget", self.args.budget, "--device", self.args.device]
        words += ["--fisher-tokens", str(self.args.fisher_tokens), "--no-plot", "--no-cache"]
        words += ["--quick"] if on == QUICK else []
        begin = time.monotonic()
        latentkv("convert", str(self.model), "-o", str(path), "--outtype", "f16", *words)
        return path, time.monotonic() - begin

    def plain(self) -> Path:
        """Full K and V, with its logits on every kind."""
        path = self.folder / "plain.gguf"
        if not path.exists():
            words = ["--method", "none", "--outtype", "f16"]
            latentkv("convert", str(self.model), "-o", str(path), *words)
        if not all(self.logits(kind).exists() for kind in mix.KINDS):
            cache = self.cache(path, {"kv": "f16"})
            for kind in mix.KINDS:
                decoded.record(cache, self.windows(cache.model, kind), self.logits(kind))
        return path

    def logits(self, kind: str) -> Path:
        return self.folder / f"{kind}-{self.args.ctx_size}-{self.args.chunks}.logits"

    def windows(self, model: Any, kind: str) -> Any:
        return decoded.windows_of(model, self.held_out[kind], self.args.ctx_size, self.args.chunks)

    def cache(self, path: Path, options: dict[str, Any]) -> answers.Cache:
        from latentkv import _core

        threads = {"n_threads": self.args.threads, "n_threads_batch": self.args.threads}
        return answers.Cache(_core.Model(str(path), n_gpu_layers=self.layers), options | threads)

    def row(self, on: str) -> dict[str, Any]:
        path, seconds = self.convert(on)
        cache = self.cache(path, {})
        klds = {}
        for kind in mix.KINDS:
            windows = self.windows(cache.model, kind)
            result = decoded.compared(cache, windows, self.logits(kind), len(windows.tokens))
            klds[f"kld_{kind}"] = result["kld"]["mean"]
        row = {"on": on, **klds, "mean": sum(klds.values()) / len(klds), "seconds": seconds}
        row["found"] = self.found(cache)
        path.unlink()
        return row

    def found(self, cache: answers.Cache) -> float:
        samples = hide.questions(self.held_out["prose"], self.args.samples, 6000, depths=DEPTHS)
        return float(needles.accuracy(samples, needles.asked(cache, samples, len(samples)))["accuracy"])

    def run(self) -> None:
        result = self.args.out or RESULTS / f"kinds-{self.name}.json"
        rows = record.finished(result, self.command(), self.args.restart)
        plain = self.plain()
        if not any(row["on"] == "full K and V" for row in rows):
            empty = dict.fromkeys(column.key for column in COLUMNS)
            found = self.found(self.cache(plain, {"kv": "f16"}))
            rows.append(empty | {"on": "full K and V", "found": found})
        for on in CALIBRATED_ON:
            if any(row["on"] == on for row in rows):
                continue
            rows.append(self.row(on))
            compare(rows)
            print(rows[-1], flush=True)
            record.save(result, command=self.command(), columns=COLUMNS, rows=rows, note=self.note())

    def command(self) -> str:
        args = self.args
        words = ["python", "bench/lab/kinds.py", self.name, "--device", args.device]
        words += ["--kv-budget", args.budget]
        words += ["--fisher-tokens", str(args.fisher_tokens), "-c", str(args.ctx_size)]
        return shlex.join([*words, "--chunks", str(args.chunks), "--samples", str(args.samples)])

    def note(self) -> str:
        args = self.args
        return (
            f"`{self.model.name}`, weights in f16, `--kv-budget {args.budget}`; the converter's own texts, "
            f"{args.chunks} held-out windows of {args.ctx_size} tokens of every kind, second halves decoded "
            f"token by token. KLD in nats per token against f16 rows. Found: of {args.samples} numbers, each "
            f"at {len(DEPTHS)} depths of 6000 characters. Converted and measured on {args.device}."
        )


def compare(rows: list[dict[str, Any]]) -> None:
    """Adds to every row the largest of its ratios to the best value of a column."""
    measured = [row for row in rows if row["mean"] is not None]
    for row in measured:
        row["worst"] = max(
            row[key] / min(other[key] for other in measured) for key in (f"kld_{kind}" for kind in mix.KINDS)
        )


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("model", help=f"{', '.join(real_models.MODELS)} or a GGUF")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--kv-budget", dest="budget", default="14%")
    parser.add_argument("--fisher-tokens", type=int, default=16384)
    parser.add_argument("-c", "--ctx-size", type=int, default=2048)
    parser.add_argument("--chunks", type=int, default=4, help="windows of every kind (default 4)")
    parser.add_argument("--samples", type=int, default=8, help="hidden numbers per depth (default 8)")
    parser.add_argument("--work", type=Path, default=Path("build/kinds"), help="where files go")
    parser.add_argument("--out", type=Path, help="default: bench/results/kinds-NAME.json")
    parser.add_argument("-t", "--threads", type=int, default=0)
    parser.add_argument("--restart", action="store_true", help="forget finished rows")
    Kinds(parser.parse_args()).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
