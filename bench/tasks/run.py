"""A task's command: every cache serves every problem, and what it lost against f16 is counted.

Answers are written to WORK/NAME-TASK/CACHE.jsonl as they come, and rows of what is answered so far every few
seconds; the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import replace
from math import comb, isnan, nan
from pathlib import Path
from typing import Any

import record
from inputs import real_models
from record import RESULTS, Column
from serving import started
from tasks.answers import Answers, Solved
from tasks.caches import NAMES, Cache, caches, command, scale
from tasks.task import Client, Problem, Refused, Task

Scores = dict[str, dict[str, list[float]]]  # cache, group: a number a problem, nan where there is no answer
EVERY = 5  # seconds between two rows of a cache that is not finished


def parser(description: str | None) -> argparse.ArgumentParser:
    made = command(description)
    made.add_argument("--groups", default="", help="some of them, comma separated")
    made.add_argument("--problems", type=int, default=0, help="the first ones of every group (default: all)")
    made.add_argument("--parallel", type=int, default=4, help="at a time (default: 4)")
    made.add_argument("--context", type=int, default=0, help="tokens for each (default: as the task needs)")
    made.add_argument("--seconds", type=float, default=0, help="of a cache, then the next one is tried")
    made.add_argument("--score", action="store_true", help="ask nothing: score what all caches answered")
    made.add_argument("--pairs", action="store_true", help="ask nothing: each cache beside f16 on the same")
    made.add_argument("--restart", action="store_true", help="forget earlier answers")
    return made


def main(args: argparse.Namespace, make: Callable[[argparse.Namespace], Task]) -> int:
    """Status: 0, or 2 behind one line that says why."""
    try:
        solve(args, make)
    except Refused as error:
        print(error, file=sys.stderr)
        return 2
    except SystemExit as error:
        print(error.code, file=sys.stderr)
        return 2
    return 0


def solve(args: argparse.Namespace, make: Callable[[argparse.Namespace], Task]) -> None:
    if args.parallel < 1:
        raise SystemExit(f"error: [--parallel] expected a positive number; got {args.parallel}")
    if args.seconds < 0:
        raise SystemExit(f"error: [--seconds] expected a number from 0; got {args.seconds:g}")
    if args.problems < 0:
        raise SystemExit(f"error: [--problems] expected a number from 0; got {args.problems}")
    model = real_models.model_path(args.model)
    args.name = args.name or real_models.stem(args.model)
    task = chosen(make(args), args)
    Run(task, args, model).run()


def chosen(task: Task, args: argparse.Namespace) -> Task:
    """The groups and problems that the command asks for."""
    names = args.groups.split(",") if args.groups else list(task.groups)
    if unknown := [name for name in names if name not in task.groups]:
        raise SystemExit(f"error: [--groups] expected {','.join(task.groups)}; got {','.join(unknown)}")
    ranked: list[tuple[int, Problem]] = []
    for name in names:
        found = [problem for problem in task.problems if problem.group == name]
        ranked += enumerate(found[: args.problems] if args.problems else found)
    problems = [problem for _, problem in sorted(ranked, key=lambda each: each[0])]  # groups in turns
    groups = {name: task.groups[name] for name in names}
    return replace(task, groups=groups, problems=problems)


def percent(scores: Sequence[float]) -> float | None:
    """The mean of those that are known."""
    known = [each for each in scores if not isnan(each)]
    return 100 * sum(known) / len(known) if known else None


class Run:
    def __init__(self, task: Task, args: argparse.Namespace, model: Path) -> None:
        self.task, self.args, self.model = task, args, model
        self.caches = caches(args.caches, model, args.work, args.name)
        self.folder: Path = args.work / f"{args.name}-{task.name}"
        self.out: Path | None = args.out or (RESULTS / "tasks" / f"{args.save}.json" if args.save else None)
        self.command = command_line(task, args)
        self.scores: Scores = {}
        self.shares: dict[str, float] = {}
        self.rows: list[dict[str, Any]] = []
        if self.out:
            self.rows = record.finished(self.out, self.command, args.restart)
        if self.rows and self.out:
            kept = json.loads(self.out.read_text(encoding="utf-8"))["scores"]
            self.scores = {
                name: {column: list(map(float, text.split())) for column, text in of.items()}
                for name, of in kept.items()
            }

    def run(self) -> None:
        if self.args.score or self.args.pairs:
            self.caches = [
                cache for cache in self.caches if cache.file.exists() and self.answers(cache).read()
            ]
            counted = [each for each in self.caches if each.name == "f16" or not self.args.pairs]
            if not counted:
                raise SystemExit("error: [--caches] expected answers of f16; got none")
            known = [self.answers(cache).read().keys() for cache in counted]
            problems = [p for p in self.task.problems if all((p.group, p.name) in each for each in known)]
            self.task = replace(self.task, problems=problems)
        done = {row["cache"] for row in self.rows if row["answered"] == row["asked"]}
        for cache in self.caches:
            if cache.label in done:
                continue
            cache.make(self.model, self.args.device)
            answers = self.answers(cache)
            if self.args.restart:
                answers.path.unlink(missing_ok=True)
            kept = answers.read()
            asked = [(each.group, each.name) for each in self.task.problems]
            solved = {each: kept[each] for each in asked if each in kept}
            left = [each for each in self.task.problems if (each.group, each.name) not in solved]
            left = [] if self.args.pairs else left
            refused = self.solve(cache, left, solved, answers) if left else None
            self.keep(cache, solved)
            print(self.shown(cache.label), flush=True)
            if refused:
                raise refused

    def answers(self, cache: Cache) -> Answers:
        return Answers(self.folder / f"{cache.name.removesuffix('%')}.jsonl", cache.file)

    def solve(self, cache: Cache, left: list[Problem], solved: Solved, answers: Answers) -> Refused | None:
        """Asks for what is left until the time is over and adds it to `solved`; why a problem was refused.
        The row so far is written every few seconds."""
        parallel = scale(cache, min(self.args.parallel, len(self.task.problems)))
        room = (self.args.context or max(self.task.groups.values())) * parallel
        options = ["-np", str(parallel), "-c", str(room), "--temp", "0", *cache.options, "--cache-ram", "0"]
        options += ["-ngl", "99"] if self.args.device == "cuda" else []
        options += ["-t", str(self.args.threads)] if self.args.threads else []
        begin = kept = time.monotonic()
        refused: Refused | None = None
        with started([sys.executable, "-m", "latentkv"], str(cache.file), options) as (address, _):
            client = Client(address)
            beside = futures.ThreadPoolExecutor(parallel)
            try:
                waiting = {beside.submit(self.task.solve, client, each): each for each in left}
                over = begin + self.args.seconds - time.monotonic() if self.args.seconds else None
                for each in futures.as_completed(waiting, over):
                    problem = waiting[each]
                    try:
                        outcomes = each.result()
                    except Refused as error:
                        refused = refused or error
                        continue
                    solved[problem.group, problem.name] = outcomes
                    answers.add(problem, outcomes, time.monotonic() - begin)
                    if time.monotonic() > kept + EVERY:
                        self.keep(cache, solved)
                        kept = time.monotonic()
            except futures.TimeoutError:
                pass
            finally:  # the server ends next, and with it what still waits for an answer
                beside.shutdown(wait=False, cancel_futures=True)
        return refused

    def keep(self, cache: Cache, solved: Solved) -> None:
        """The row of a cache, of as many problems as are solved."""
        every = [each for outcomes in solved.values() for each in outcomes]
        if not every:
            return
        scores: dict[str, list[float]] = {name: [] for name in self.names}
        columns = [each.column for each in next(iter(solved.values()))]  # the same of all problems
        for problem in self.task.problems:
            outcomes = solved.get((problem.group, problem.name))
            found = [each.score for each in outcomes] if outcomes else [nan] * len(columns)
            for column, score in zip(columns, found, strict=True):
                scores[column or problem.group].append(score)
        self.scores[cache.label] = scores
        numbers: dict[str, Any] = {"share": self.share(cache)}
        numbers |= {name: percent(of) for name, of in scores.items()}
        numbers["written"] = sum(each.written for each in every) / len(every)
        numbers["read"] = sum(each.read for each in every) / len(every)
        numbers |= {"answered": len(solved), "asked": len(self.task.problems)}
        self.rows = [row for row in self.rows if row["cache"] != cache.label]
        self.rows.append({"cache": cache.label} | numbers)
        for row in self.rows:  # f16 may have come last
            row |= self.beside_f16(self.scores[row["cache"]])
        if self.out:
            self.save(self.out)

    def share(self, cache: Cache) -> float:
        if cache.label not in self.shares:
            self.shares[cache.label] = cache.share(self.model)
        return self.shares[cache.label]

    def shown(self, label: str) -> str:
        row = next((row for row in self.rows if row["cache"] == label), None)
        if row is None:
            return f"{label}: no answer"
        line = [f"{c.label} {record.cell(row[c.key], c.format)}" for c in self.columns[1:]]
        return f"{label}: {', '.join(line)}, answered {row['answered']} of {row['asked']}"

    def beside_f16(self, scores: dict[str, list[float]]) -> dict[str, float | None]:
        """Problems that went worse and better than with f16, which has none of either, of those that both
        have answered; what both scored on these; how likely such a difference is by chance (sign test)."""
        reference = self.scores.get("f16")
        if reference is None or reference is scores:
            own = percent([score for of in scores.values() for score in of])
            return dict.fromkeys(("lost", "won", "there", "chance")) | {"here": own}
        every = [pair for name, of in scores.items() for pair in zip(reference[name], of, strict=False)]
        pairs = [pair for pair in every if not any(map(isnan, pair))]
        lost, won = sum(own < other for other, own in pairs), sum(own > other for other, own in pairs)
        chance = sum(comb(lost + won, k) for k in range(min(lost, won) + 1)) / 2 ** (lost + won)
        there, here = (percent(scores) for scores in zip(*pairs, strict=True)) if pairs else (None, None)
        return {"lost": lost, "won": won, "here": here, "there": there, "chance": min(1.0, 2 * chance)}

    @property
    def names(self) -> tuple[str, ...]:
        return self.task.columns or tuple(self.task.groups)

    @property
    def columns(self) -> list[Column]:
        each = [Column(name, name, ".1f", "%") for name in self.names]
        beside = [Column("there", "f16", ".1f", "%"), Column("here", "this cache", ".1f", "%")]
        return [
            Column("cache", "cache"),
            Column("share", "of f16", ".1f", "%"),
            *([Column("answered", "problems"), *beside] if self.args.pairs else each),
            Column("lost", "lost against f16"),
            Column("won", "won"),
            *([Column("chance", "by chance", ".2f")] if self.args.pairs else []),
            Column("written", "tokens written", ".0f"),
        ]

    def save(self, out: Path) -> None:
        counts = {name: sum(p.group == name for p in self.task.problems) for name in self.task.groups}
        read = self.rows[0]["read"]
        note = (
            f"{self.task.title} `{self.model.name}`; problems: "
            f"{', '.join(f'{name} {count}' for name, count in counts.items())}. Greedy answers, one a "
            f"problem, prompts of {read:.0f} tokens on average, {self.args.parallel} at a time."
        )
        order = [cache.label for cache in caches(NAMES, self.model, self.args.work, self.args.name)]
        self.rows.sort(key=lambda row: order.index(row["cache"]) if row["cache"] in order else len(order))
        packed = {
            cache: {name: " ".join(f"{score:.4g}" for score in of) for name, of in groups.items()}
            for cache, groups in self.scores.items()
        }
        record.save(out, command=self.command, columns=self.columns, rows=self.rows, note=note, scores=packed)


def command_line(task: Task, args: argparse.Namespace) -> str:
    """What a reader types in the root."""
    words = ["python", f"bench/tasks/{task.name}.py", real_models.shown(args.model), "--device", args.device]
    words += ["--groups", args.groups] if args.groups else []
    words += ["--problems", str(args.problems)] if args.problems else []
    words += ["--parallel", str(args.parallel)] + (["--pairs"] if args.pairs else [])
    for name in ("kinds", "samples", "turns"):  # of one task alone
        words += [f"--{name}", str(getattr(args, name))] if getattr(args, name, "") else []
    words += ["--save", args.save] if args.save else []
    return shlex.join(words)
