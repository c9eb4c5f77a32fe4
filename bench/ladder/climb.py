"""The work of bench/ladder.py: files are made and cells measured as workers are free; every row is kept."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import curves
import record
from inputs import texts
from inputs.real_models import model_path
from ladder import rungs
from ladder.cell import DEPTHS, SERVED, Job
from ladder.options import command_line, gpus
from ladder.rungs import Conversions, File, Rung
from ladder.workers import run_all
from record import Column

BENCH = Path(__file__).parent.parent
TRIES = 4  # of a file that takes too many bytes, each with fewer dimensions
COLUMNS = [
    Column("family", "cache"),
    Column("setting", "setting"),
    Column("share", "of f16", ".2%"),
    Column("bytes", "bytes per token", ",.0f"),
    Column("factors", "factors, MiB", ".1f"),
    Column("kld", "mean KLD", ".5f"),
    Column("kld_se", "±", ".5f"),
    Column("kld_median", "median", ".5f"),
    Column("kld_p999", "99.9 %", ".3f"),
    Column("same_top", "same top", ".1%"),
    Column("ppl", "perplexity", ".3f"),
]
FOUND = [Column(f"found_{depth:.0%}", f"found at {depth:.0%}", ".0%") for depth in DEPTHS]
DRIFT = [
    Column("first_difference", "answers part after", ".0f"),
    Column("equal", "same tokens", ".0%"),
    Column("length", "length", ".0f"),
    Column("quoted", "quoted"),
]


class Ladder:
    """The work of one command: files are made and cells measured as workers are free."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.model = model_path(args.model)
        self.calib, self.text = args.calib, args.text
        if self.calib is None or self.text is None:
            own = texts.write(args.work / "texts")
            self.calib, self.text = self.calib or own[0], self.text or own[1]
        self.texts = texts.digest(*(path.read_text(encoding="utf-8") for path in (self.calib, self.text)))
        self.command = command_line(args)
        tokens = (args.calib_tokens, args.fisher_tokens)
        self.conversions = Conversions(self.calib, args.device, args.outtype, *tokens)
        self.folder: Path = args.work / f"{args.name}-{self.key(args.outtype, *tokens)}"
        self.reference = self.folder / f"reference-{self.key(self.command)}"
        if args.restart:
            shutil.rmtree(self.reference, ignore_errors=True)
        self.reference.mkdir(parents=True, exist_ok=True)
        rows = finished(args.out, self.command, self.texts, args.restart)
        self.rows = [row for row in rows if row["kld"] is not None]  # others are tried again
        self.processors = processors(args.device, args.jobs)
        self.begin = time.monotonic()

    def key(self, *settings: object) -> str:
        """What files depend on beside their name."""
        return texts.digest(str(self.model.resolve()), self.texts, *map(str, settings))

    def path(self, file: File) -> Path:
        if file == rungs.PLAIN and self.model.is_file() and not self.args.outtype:
            return self.model
        return self.folder / f"{file.name}.gguf"

    def make(self, file: File) -> str:
        """Converts; why it could not be, or ""."""
        path, args = self.path(file), self.args
        if path.exists():
            return ""
        begin = time.monotonic()
        command = self.conversions.command(file, self.model, path)
        done = self.process(command, {"OMP_NUM_THREADS": str(args.threads)} if args.threads else {})
        print(f"{file.name}: converted in {time.monotonic() - begin:.0f} s", flush=True)
        return last_line(done.stderr) if done.returncode else ""

    def process(self, words: list[str], environment: dict[str, str] | None = None) -> Any:
        """Python with these words, on the GPU that has waited longest."""
        own = self.processors.get()
        try:
            environment = os.environ | own | (environment or {})
            return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment)
        finally:
            self.processors.put(own)

    def fitted(self, rung: Rung) -> dict[str, Any]:
        """The row of a file within the budget: bytes are estimated, and those taken lead the next guess."""
        asked, tried = rung, []
        row = self.measure(rung)
        while row["kld"] is None and row["share"] and rung.keep and rung.budget and len(tried) < TRIES:
            tried.append((rung.keep, row["share"]))
            keep = rungs.lower(rung.budget, tried)
            if keep <= 0:
                break
            rung = rung.kept(keep)
            if why := self.make(rung.file):
                return self.row(rung, {"why": why, "rung": asked.name})
            row = self.measure(rung)
            self.forget(rung.file)
        return row | {"rung": asked.name}

    def forget(self, file: File) -> None:
        if not self.args.keep_files:
            self.path(file).unlink(missing_ok=True)

    def measure(self, rung: Rung) -> dict[str, Any]:
        """The row; without numbers where there is a reason."""
        begin = time.monotonic()
        path = self.folder / f"job-{re.sub(r'[^a-z0-9.]+', '-', rung.name.lower())}.json"
        path.write_text(json.dumps(asdict(self.job(rung))), encoding="utf-8")
        done = self.process(["-m", "ladder.cell", str(path)], {"PYTHONPATH": search_path()})
        if done.returncode:
            return self.row(rung, {"why": last_line(done.stderr)})
        path.unlink()
        return self.row(rung, json.loads(done.stdout) | {"seconds": round(time.monotonic() - begin, 1)})

    def job(self, rung: Rung) -> Job:
        args = self.args
        return Job(
            file=str(self.path(rung.file)),
            plain=str(self.path(rungs.PLAIN)),
            folder=str(self.reference),
            text=str(self.text),
            options=rung.options,
            budget=rung.budget,
            n_ctx=args.ctx_size,
            chunks=args.chunks,
            scored=args.scored,
            samples=args.samples,
            chars=args.chars,
            answers=args.answers,
            tokens=args.tokens,
            parallel=args.parallel,
            threads=args.threads,
            gpu_layers=99 if args.device == "cuda" else 0,
            program=str(args.llama_cpp.resolve()),
        )

    def row(self, rung: Rung, numbers: dict[str, Any]) -> dict[str, Any]:
        empty = dict.fromkeys(column.key for column in self.columns)
        return empty | {"family": rung.family, "setting": rung.setting} | numbers

    @property
    def columns(self) -> list[Column]:
        return COLUMNS + (FOUND if self.args.samples else []) + (DRIFT if self.args.answers else [])

    def keep(self, row: dict[str, Any], left: int) -> None:
        """Writes the result with one row more, in the ladder's order."""
        self.rows.append(row)
        order = {rung.name: at for at, rung in enumerate(self.all)}
        self.rows.sort(key=lambda each: order.get(asked(each), len(order)))
        record.save(
            self.args.out,
            command=self.command,
            columns=self.columns,
            rows=self.rows,
            note=self.note(),
            texts=self.texts,
        )
        numbers = ("share", "kld", "kld_median", "kld_p999", "ppl", "first_difference")
        shown = [f"{c.label} {record.cell(row[c.key], c.format)}" for c in self.columns if c.key in numbers]
        what = row["why"] if row["kld"] is None else ", ".join(shown)
        clock = time.monotonic() - self.begin
        print(f"{row['family']} {row['setting']}: {what} ({clock:.0f} s, {left} cells left)", flush=True)

    def run(self) -> int:
        if why := self.make(rungs.PLAIN):
            raise SystemExit(why)
        every = rungs.rungs(shape(self.path(rungs.PLAIN)))
        self.all = [rung for rung in every if rung.family != "llama.cpp" or self.args.llama_cpp.exists()]
        done = {asked(row) for row in self.rows}
        reference, *others = [rung for rung in self.all if rung.name not in done or rung == self.all[0]]
        wanted = [rung for rung in others if re.search(self.args.only, rung.name)]
        if reference.name not in done or not self.has_reference():
            row = self.measure(reference)
            self.rows = [
                each
                for each in self.rows
                if each["setting"] != reference.setting or each["family"] != reference.family
            ]
            self.keep(row, len(wanted))
            if row["kld"] is None:
                return 2
        return self.climb(wanted)

    def climb(self, wanted: list[Rung]) -> int:
        # Conversions that need the same statistics should not start together; `size` finds those of `speed`.
        wanted = sorted(wanted, key=lambda rung: rung.family == "waterfill, size")
        left, failed = len(wanted), 0
        last = {rung.file: rung for rung in wanted}
        for rung, row in run_all(wanted, lambda rung: rung.file, self.make, self.fitted, self.args.jobs):
            left -= 1
            result = self.row(rung, {"why": row}) if isinstance(row, str) else row
            failed += result["kld"] is None
            self.keep(result, left)
            published = rung.file not in (rungs.PLAIN, rungs.OSCAR) and "waterfill" not in rung.file.words
            if published and last[rung.file] == rung:
                self.forget(rung.file)
        if self.args.plot:
            title = f"{self.args.name}, decoded at {self.args.ctx_size} tokens"
            rows = curves.rows_of({"columns": [{"key": c.key} for c in self.columns], "rows": self.rows})
            curves.draw(rows, self.args.out.with_suffix(".png"), title)
        return 1 if failed else 0

    def has_reference(self) -> bool:
        needed = ["reference.logits"] + (["reference.answers.json"] if self.args.answers else [])
        return all((self.reference / name).exists() for name in needed)

    def note(self) -> str:
        args = self.args
        weights = f", weights in {args.outtype}" if args.outtype else ""
        text = f"`{args.text.name}`" if args.text else "the held-out text of `bench/inputs/texts.py`"
        scored = f"the last {args.scored}" if args.scored else "second halves, behind the first as a prompt"
        said = (
            f"`{self.model.name}`{weights}; {text} in {args.chunks} windows of {args.ctx_size} tokens: "
            f"{scored}, decoded token by token and scored. KLD in nats per "
            f"token against f16 rows of the same weights. Bytes: all that is allocated for {SERVED} tokens, "
            "over as many; factors are weights on top. `+ window`: the first 4 and the last 128 tokens exact."
        )
        if args.samples:
            said += f" Found: of {args.samples} numbers, each at three depths of {args.chars} characters."
        if args.answers:
            said += (
                f" {args.answers} answers of up to {args.tokens} tokens: how many (median) come before the "
                "first that differs from f16's, share of equal tokens, mean length, sentences of the prompt "
                "that are quoted after them. f16 beside itself: in batches of another size."
            )
        ran = next((row["ran"] for row in self.rows if row.get("ran")), "")
        return f"{said} Attention: {ran}." if "cuda" in ran.partition("(")[0] else said


def asked(row: dict[str, Any]) -> str:
    """The name of the rung that a row belongs to; its file may keep fewer dimensions."""
    return row.get("rung") or f"{row['family']} {row['setting']}"


def search_path() -> str:
    """Where a process finds this folder's modules."""
    return os.pathsep.join(filter(None, (str(BENCH), os.environ.get("PYTHONPATH"))))


def processors(device: str, jobs: int) -> SimpleQueue[dict[str, str]]:
    """The environments of processes that run beside each other: one GPU each, in turns."""
    queue: SimpleQueue[dict[str, str]] = SimpleQueue()
    names = gpus() if device == "cuda" else []
    for at in range(jobs):
        queue.put({"CUDA_VISIBLE_DEVICES": names[at % len(names)]} if names else {})
    return queue


def shape(plain: Path) -> rungs.Shape:
    from latentkv import _core

    model = _core.Model(str(plain))
    slots = model.forecast(rungs.SERVED, kv="f16", sink=0, recent=0)["layer_slots"]
    return rungs.Shape(model.n_layer, model.n_head_kv, model.head_dim, model.n_head, sum(slots) / len(slots))


def finished(path: Path, command: str, digest: str, restart: bool) -> list[dict[str, Any]]:
    """Rows of an earlier run of the same command on the same texts."""
    rows = record.finished(path, command, restart)
    if rows and json.loads(path.read_text(encoding="utf-8")).get("texts") != digest:
        raise SystemExit(f"error: [texts] expected those of {path.name}; got others; pass --restart")
    return rows


def last_line(text: str) -> str:
    """Why a program failed: its last line, or before a trace of frames the last that speaks of an error."""
    lines = [line.split("\r")[-1] for line in text.strip().splitlines() if line.strip()]
    spoken = [line for line in lines if re.search(r"error|assert|abort|out of memory", line, re.IGNORECASE)]
    return (spoken or lines or ["no message"])[-1]
