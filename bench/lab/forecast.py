"""What a conversion's forecast says, and what other texts lose at other lengths.

    python bench/lab/forecast.py MODEL -f TEXT --device cuda

MODEL is a name of bench/inputs/real_models.py or a GGUF. For every budget the plan that the converter writes,
on the windows of the forecast, on the language reference's held-out chapters (bench/inputs/texts.py) and on
TEXT, all of twice the statistics' tokens, and in windows of the statistics' own size.
Rows are written to bench/results/levers/forecast-NAME.json as they are measured.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/

import levers

import record
from inputs import texts
from latentkv_convert.calibrate.sample import cut, encode
from latentkv_convert.ir import Plan
from latentkv_convert.plan import forecast
from record import RESULTS, Column

FORECAST, REFERENCE, OTHER = TEXTS = ("forecast", "reference", "other")
COLUMNS = [
    Column("budget", "budget"),
    Column("plan", "plan"),
    *itertools.chain.from_iterable(
        (Column(text, f"{text} text", ".5f"), Column(f"{text}_se", "±", ".5f")) for text in TEXTS
    ),
    Column("fitted", "fitted text", ".5f"),
    Column("short", "reference text, shorter windows", ".5f"),
]


class Forecasts(levers.Levers):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        sample, source, n = self.work.sample, self.work.source, args.windows
        assert sample is not None
        size, held = sample.tokens.shape[1], forecast.held_back(sample, n)
        deep = held.shape[1]
        reference = encode("\n".join(texts.chapters()[1]), source)
        other = cut(encode(args.file.read_text(encoding="utf-8"), source), deep)
        self.windows = {
            FORECAST: held,
            REFERENCE: cut(reference, deep)[:n],
            OTHER: other[:: max(1, len(other) // n)][:n],
            "fitted": forecast.fitted(sample)[-n:],
            "short": cut(reference, size)[:n],
            "held": held,  # a window to begin with
        }

    def note(self, budget: str, scales: str, name: str, plan: Plan, seconds: float, rows: Any = None) -> None:
        row: dict[str, Any] = {"budget": budget, "plan": self.args.name} | dict.fromkeys(
            column.key for column in COLUMNS[2:]
        )
        self.rows.append(row)
        out = self.args.out or RESULTS / "levers" / f"forecast-{self.name}.json"
        for text in self.windows:
            if text == "held":
                continue
            nats = self.nats(plan.cut(), text, {})
            row[text] = float(nats.mean())
            if text in TEXTS:
                row[f"{text}_se"] = float(nats.mean(1).std() / len(nats) ** 0.5)
            print(row, flush=True)
            record.save(
                out, command=self.command(), columns=COLUMNS, rows=self.rows, note=self.note_of_table()
            )

    def command(self) -> str:
        args = self.args
        words = ["python", "bench/lab/forecast.py", self.name, "-f", args.file.name]
        words += ["--calib", args.calib.name] if args.calib else []
        words += ["--device", args.device, "--budgets", args.budgets, "--windows", str(args.windows)]
        return shlex.join([*words, *(["--convert", args.convert] if args.convert else [])])

    def note_of_table(self) -> str:
        n, deep, size = self.args.windows, self.windows[REFERENCE].shape[1], self.windows["short"].shape[1]
        return (
            f"`{self.model.name}`, `--prefer speed`; mean KLD in nats per token against the uncompressed "
            f"model, second halves of up to {n} windows of {deep} tokens, fitted and shorter ones of {size}; "
            f"products in f32, on {self.args.device}. forecast: windows that the converter's forecast is "
            f"measured on; reference: held-out chapters of Python's language reference; other: "
            f"`{self.args.file.name}`; fitted: windows that statistics saw."
        )


def main() -> int:
    parser = levers.parser(__doc__)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--name", default="default", help="of the plan in the table")
    args = parser.parse_args()
    args.scales, args.plans, args.polish = "row", "", 0  # the plan that is written, no others
    return levers.run(Forecasts, args)


if __name__ == "__main__":
    sys.exit(main())
