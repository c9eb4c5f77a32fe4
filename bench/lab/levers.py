"""What each lever of the planner is worth at equal bytes.

    python bench/lab/levers.py MODEL -f TEXT --device cuda

MODEL is a name of bench/inputs/real_models.py or a GGUF. For every budget and kind of rows: the plan by
Fisher moments alone; with the energy given back that few bits take; with what errors cost that are alike in
all tokens; with both; corrected while the plan runs; trained (`--polish`). The converter's code runs them,
in f32, on windows of the calibration text that nothing was fitted to, and on TEXT. Rows are written to
bench/results/levers/levers-NAME.json as they are measured.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/

import record
from command import arguments
from inputs import real_models
from latentkv.plan.kv_budget import parse
from latentkv_convert import calibrate, cli
from latentkv_convert.calibrate import head
from latentkv_convert.calibrate.sample import cut, encode
from latentkv_convert.compute.arithmetic import host_threads
from latentkv_convert.fuse import energy
from latentkv_convert.ir import Plan
from latentkv_convert.plan import forecast, methods
from latentkv_convert.plan.compressed import Compressed
from latentkv_convert.plan.methods import waterfill
from latentkv_convert.plan.times import features
from latentkv_convert.plan.waterfill import choose
from latentkv_convert.recover import polish
from latentkv_convert.source.open_source import open_source
from latentkv_convert.weights.encoding import Encoding
from latentkv_convert.work import Work
from record import RESULTS, Column

COLUMNS = [
    Column("budget", "budget"),
    Column("scales", "scales"),
    Column("plan", "plan"),
    Column("held", "held-back text", ".5f"),
    Column("held_se", "±", ".5f"),
    Column("held_p999", "99.9 %", ".3f"),
    Column("other", "other text", ".5f"),
    Column("other_se", "±", ".5f"),
    Column("other_p999", "99.9 %", ".3f"),
    Column("us", "µs a layer at 65536", ".1f"),
    Column("seconds", "seconds", ".0f"),
]
BY_FISHER, BOTH = "before", "both"


class Levers:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.began = args, time.monotonic()
        self.rows: list[dict[str, Any]] = []
        self.name, self.model = real_models.stem(args.model), real_models.model_path(args.model).resolve()
        words = [str(self.model), "-o", "none.gguf", "--device", args.device, *shlex.split(args.convert)]
        words += ["--calib", str(args.calib)] if args.calib else []
        recipe = cli.parse(words, "convert")
        source, self.waterfill = open_source(recipe.source, None), waterfill
        self.recipe = methods.resolved(recipe, source.spec)
        self.method = self.waterfill.create(self.recipe.options, source.spec)
        stats, sample = calibrate.collect(self.method.needs, self.recipe, source)
        assert sample is not None
        stored_as = Encoding.of(source.spec, source.outtype, None, True, None)
        self.work = Work(source, stats, 0, self.method.decompose, sample, args.device, encoding=stored_as)
        text = encode(args.file.read_text(encoding="utf-8"), source)
        self.windows = {
            "held": forecast.held_back(sample, args.windows),
            "other": cut(text, sample.tokens.shape[1])[: args.windows],
        }
        self.exact: dict[bytes, torch.Tensor] = {}  # last outputs of the uncompressed model, by windows

    def run(self) -> None:
        for scales in self.args.scales.split(","):
            for budget in self.args.budgets.split(","):
                self.budget(budget, scales)

    def budget(self, budget: str, scales: str) -> None:
        options = {**self.recipe.options, "kv_budget": parse(budget), "scales": scales}
        self.method = method = self.waterfill.create(options, self.work.spec)
        self.work = work = replace(self.work, decompose=method.decompose)
        check = forecast.Check(work, 2)
        terms = method._terms(work, check)
        full_us = method._us(features.mean_full(work.spec))
        offers, chosen = choose(method._offers(work, terms), full_us, method.prefer)
        plain = offers[chosen].candidate
        began = time.monotonic()
        whole = method._counted(work, plain)
        seconds = time.monotonic() - began
        gains = dict(energy.GAINS)
        for name, candidate, has_gains, own in (
            (BY_FISHER, plain, False, 0.0),
            ("energy given back", plain, True, 0.0),
            ("errors of all tokens", whole, False, seconds),
            (BOTH, whole, True, seconds),
        ):
            asked = self.args.plans == "all" or name in self.args.plans.split(",")
            # rows with scales of their own give energy back by themselves
            if name != BOTH and (not asked or (scales == "row" and name != BY_FISHER)):
                continue
            energy.GAINS.update(gains if has_gains else dict.fromkeys(gains, 1.0))
            bought = method._settled(work, terms, candidate, check)
            if asked:
                self.note(budget, scales, name, bought.plan(method.shape, work.spec), own)
        energy.GAINS.update(gains)
        began = time.monotonic()
        bought = method._corrected(work, terms, whole, bought, check)
        plan = bought.plan(method.shape, work.spec)
        self.note(budget, scales, "corrected", plan, time.monotonic() - began)
        if self.args.polish:
            self.polished(budget, scales, plan)

    def polished(self, budget: str, scales: str, plan: Plan) -> None:
        plan, began = plan.cut(), time.monotonic()
        windows, guards = polish.texts(self.recipe, self.work, self.args.windows)
        rows, _ = polish.train(self.work, plan, self.args.polish, windows, guards)
        seconds = time.monotonic() - began
        self.note(budget, scales, f"corrected, {self.args.polish} steps", plan, seconds, rows)

    def note(self, budget: str, scales: str, name: str, plan: Plan, seconds: float, rows: Any = None) -> None:
        us = self.method._us(features.mean(self.work.spec, plan.layers))
        row = {"budget": budget, "scales": scales, "plan": name, "seconds": seconds}
        row |= {"us": None if us is None else us[-1], "exact": plan.recent_format}
        for text in self.windows:
            nats = self.nats(plan.cut(), text, {} if rows is None else rows)
            row |= {text: float(nats.mean()), f"{text}_p999": float(nats.flatten().quantile(0.999))}
            row[f"{text}_se"] = float(nats.mean(1).std() / len(nats) ** 0.5)
        self.rows.append(row)
        print(round(time.monotonic() - self.began), row, flush=True)
        out = self.args.out or RESULTS / "levers" / f"levers-{self.name}.json"
        record.save(out, command=self.command(), columns=COLUMNS, rows=self.rows, note=self.note_of_table())

    def nats(self, plan: Plan, text: str, rows: Any) -> torch.Tensor:
        """[windows, tokens] KL divergence, second halves, with products in f32."""
        model = Compressed(self.work, plan, rows, self.windows["held"][:1], repeats=True)
        found = []
        torch.set_float32_matmul_precision("highest")
        for begin in range(0, len(self.windows[text]), 2):
            windows = self.windows[text][begin : begin + 2]
            known = windows.tobytes() in self.exact
            model.read(windows)
            exact, cached = model.up(keep=False, both=not known)
            exact = self.exact.setdefault(windows.tobytes(), exact)
            for ours, theirs in zip(exact, cached, strict=True):
                found.append(self.of_window(model, ours, theirs))
        return torch.stack(found).double()

    @torch.no_grad()
    def of_window(self, model: Compressed, exact: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:
        ours, theirs = (each[len(each) // 2 : -1] for each in (exact, cached))
        parts = []
        for block in head.blocks(model, len(ours)):
            p, q = (model.logits(each[None, block]).log_softmax(-1) for each in (ours, theirs))
            parts.append((p.exp() * (p - q)).sum(-1).cpu())
        return torch.cat(parts)

    def command(self) -> str:
        args = self.args
        words = ["python", "bench/lab/levers.py", self.name, "-f", args.file.name]
        words += ["--calib", args.calib.name] if args.calib else []
        words += ["--device", args.device, "--budgets", args.budgets, "--scales", args.scales]
        words += ["--windows", str(args.windows), "--polish", str(args.polish)]
        return shlex.join(words)

    def note_of_table(self) -> str:
        return (
            f"`{self.model.name}`, `--prefer speed`; mean KLD in nats per token against the uncompressed "
            f"model, second halves of {self.args.windows} windows of {self.windows['held'].shape[1]} tokens "
            f"of each text, which nothing was fitted to; products in f32. Seconds of the lever alone, on "
            f"{self.args.device}, and of decoding a layer by the planner's table. before: by Fisher moments "
            f"alone; both: energy is given back, which rows with scales do by themselves, and errors of all "
            f"tokens are priced; corrected: both, then corrections."
        )


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options of every program that tries plans of a model."""
    made = arguments(description)
    made.add_argument("model", help=f"{', '.join(real_models.MODELS)} or a GGUF")
    made.add_argument("-f", "--file", type=Path, required=True, help="the other text")
    made.add_argument("--calib", type=Path, help="text to calibrate on (default: the converter's own)")
    made.add_argument("--device", default="cpu")
    made.add_argument("--budgets", default="28%,14%,8.5%")
    made.add_argument("--convert", default="", help="options of the conversion")
    made.add_argument("--out", type=Path, help="default: NAME's in bench/results/levers")
    return made


def run(made: type[Levers], args: argparse.Namespace) -> int:
    with host_threads(args.device):
        torch.set_flush_denormal(True)
        made(args).run()
    return 0


def main() -> int:
    own = parser(__doc__)
    own.add_argument("--scales", default="segment,row")
    own.add_argument("--plans", default="all", help="of those before corrections, divided by commas")
    own.add_argument("--polish", type=int, default=0, metavar="STEPS")
    own.add_argument("--windows", type=int, default=6)
    return run(Levers, own.parse_args())


if __name__ == "__main__":
    sys.exit(main())
