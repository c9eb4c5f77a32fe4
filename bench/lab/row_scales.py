"""What rows with scales of their own lose beside rows whose segments have a scale and a minimum each.

    python bench/lab/row_scales.py MODEL -f TEXT

MODEL is a name of bench/inputs/real_models.py or a GGUF. For every budget a file of either kind, weights in
f16, and its divergence from f16 rows: first halves of windows are a prompt, second halves are decoded token
by token. Every file's row is written to bench/results/rows/row-scales-NAME.json when it is measured; the same
command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/

import record
from answering import answers, decoded
from command import arguments, latentkv
from inputs import real_models
from record import RESULTS, Column

COLUMNS = [
    Column("budget", "budget"),
    Column("scales", "scales"),
    Column("share", "of f16", ".2%"),
    Column("row", "bytes of a token", ".0f"),
    Column("kld", "mean KLD", ".5f"),
    Column("se", "±", ".5f"),
    Column("ratio", "of segments'", ".2f"),
    Column("kld_p999", "99.9 %", ".3f"),
    Column("same_top", "same top token", ".1%"),
]


class Scales:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.name, self.model = real_models.stem(args.model), real_models.model_path(args.model).resolve()
        self.folder: Path = (args.work / self.name).resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.text = args.file.read_text(encoding="utf-8")
        self.logits = self.folder / f"{args.file.stem}-{args.ctx_size}-{args.chunks}.logits"

    def convert(self, stem: str, *words: str) -> Path:
        path = self.folder / f"{stem}.gguf"
        if not path.exists():
            latentkv("convert", str(self.model), "-o", str(path), "--outtype", "f16", "--no-plot", *words)
        return path

    def cache(self, path: Path, options: dict[str, Any]) -> answers.Cache:
        from latentkv import _core

        layers = 99 if self.args.device == "cuda" else 0
        threads = {"n_threads": self.args.threads, "n_threads_batch": self.args.threads}
        return answers.Cache(_core.Model(str(path), n_gpu_layers=layers), options | threads)

    def windows(self, cache: answers.Cache) -> Any:
        return decoded.windows_of(cache.model, self.text, self.args.ctx_size, self.args.chunks)

    def row(self, budget: str, scales: str) -> dict[str, Any]:
        words = ["--kv-budget", budget, "--scales", scales, "--device", self.args.device]
        words += ["--calib", str(self.args.calib)] if self.args.calib else []
        stem = f"{scales}-{budget.removesuffix('%')}" + (
            f"-{self.args.calib.stem}" if self.args.calib else ""
        )
        path = self.convert(stem, *words)
        report = json.loads((self.folder / f"{stem}.report.json").read_text(encoding="utf-8"))
        cache = self.cache(path, {})
        windows = self.windows(cache)
        found = decoded.compared(cache, windows, self.logits, len(windows.tokens))
        return {
            "budget": budget,
            "scales": scales,
            "share": report["cache"]["share_of_f16"],
            "row": report["bytes_per_token"]["plan"],
            "kld": found["kld"]["mean"],
            "se": found["kld"]["mean_se"],
            "kld_p999": found["kld"]["p999"],
            "same_top": found["same_top"],
        }

    def run(self) -> None:
        result = self.args.out or RESULTS / "rows" / f"row-scales-{self.name}.json"
        rows = record.finished(result, self.command(), self.args.restart)
        plain = self.convert("plain", "--method", "none")
        if not self.logits.exists():
            cache = self.cache(plain, {"kv": "f16"})
            decoded.record(cache, self.windows(cache), self.logits)
        for budget in self.args.budgets.split(","):
            for scales in ("segment", "row"):
                if any((row["budget"], row["scales"]) == (budget, scales) for row in rows):
                    continue
                rows.append(self.row(budget, scales))
                own = {row["scales"]: row["kld"] for row in rows if row["budget"] == budget}
                rows[-1]["ratio"] = rows[-1]["kld"] / own["segment"]
                print(rows[-1], flush=True)
                record.save(result, command=self.command(), columns=COLUMNS, rows=rows, note=self.note())

    def command(self) -> str:
        args = self.args
        words = ["python", "bench/lab/row_scales.py", self.name, "-f", args.file.name]
        words += ["--calib", args.calib.name] if args.calib else []
        words += ["--device", args.device, "--budgets", args.budgets]
        return shlex.join([*words, "-c", str(args.ctx_size), "--chunks", str(args.chunks)])

    def note(self) -> str:
        args = self.args
        return (
            f"`{self.model.name}`, weights in f16, `--prefer speed`; {args.chunks} windows of "
            f"{args.ctx_size} tokens of {args.file.name}, second halves decoded token by token. KLD in nats "
            f"per token against f16 rows of the same weights. Bytes are all that is allocated for 32768 "
            f"tokens, over as many; a token's are its compressed rows. Measured on {args.device}."
        )


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("model", help=f"{', '.join(real_models.MODELS)} or a GGUF")
    parser.add_argument("-f", "--file", type=Path, required=True, help="text to measure on")
    parser.add_argument("--calib", type=Path, help="text to calibrate on (default: the converter's own)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--budgets", default="28%,14%,8.5%")
    parser.add_argument("-c", "--ctx-size", type=int, default=1024)
    parser.add_argument("--chunks", type=int, default=4, help="windows (default 4)")
    parser.add_argument("--work", type=Path, default=Path("build/row-scales"), help="where files go")
    parser.add_argument("--out", type=Path, help="default: bench/results/rows/row-scales-NAME.json")
    parser.add_argument("-t", "--threads", type=int, default=0)
    parser.add_argument("--restart", action="store_true", help="forget finished rows")
    Scales(parser.parse_args()).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
