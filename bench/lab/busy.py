"""Decoding beside other programs: tokens per second alone and with all cores taken, beside a fair share.

    python bench/lab/busy.py MODEL [-t 1,2] [--beside N] [--seconds S] [--rounds N] [--save NAME]

MODEL is a name of bench/inputs/real_models.py or a GGUF. `decode` computes token after token; `chat` is
Llama's stream, with what Python does between tokens. `--beside` programs count in a loop (default: as many as
there are cores), each in a session of its own, as from another terminal. What is fair is measured as well:
the share of its time that a program of as many threads gets there whose threads wait for nothing. Everything
runs in turns, so that what else the machine does meets all of them; before that decode has to agree with
prefill.

For two cores of a larger machine: taskset -c 0,1 python bench/lab/busy.py smollm2 --save busy-smollm2
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/

from inputs import real_models
from record import RESULTS, Column, save

COLUMNS = [
    Column("what", "what"),
    Column("threads", "threads"),
    Column("alone", "alone, tokens/s", ".1f"),
    Column("beside", "beside, tokens/s", ".1f"),
    Column("kept", "kept", ".2f", "x"),
    Column("fair", "fair share", ".2f", "x"),
    Column("of_fair", "of the fair share", ".0%"),
]
PROMPT = "The clerk of the town wrote numbers into a book, and then"
CONTEXT = 2048


def decode(model: str, threads: int) -> Any:
    """A function of seconds: tokens per second of a session that decodes from position 64 again and again."""
    import numpy as np

    import cpu
    from latentkv import _core

    opened = _core.Model(model)
    cpu.check(Path(model).name, opened, "")
    session = _core.Session(opened, n_ctx=CONTEXT, n_threads=threads, n_threads_batch=threads)
    tokens = np.random.default_rng(0).integers(0, opened.n_vocab, CONTEXT).tolist()
    session.decode(tokens[:64], output="none")

    def turn(seconds: float) -> float:
        begin, n = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            session.decode([tokens[64 + n % 64]], output="last")
            n += 1
            if n % 64 == 0:
                session.seq_rm(0, 64, -1)
        speed = n / (time.perf_counter() - begin)
        session.seq_rm(0, 64, -1)
        return speed

    return turn


def chat(model: str, threads: int) -> Any:
    """The same of answers that stream from `Llama`."""
    from latentkv import Llama

    llm = Llama(model, n_ctx=CONTEXT, n_threads=threads, n_threads_batch=threads, verbose=False)
    never = {llm.token_eos(): -1e9}

    def turn(seconds: float) -> float:
        begin, n = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            for _ in llm(PROMPT, max_tokens=256, stream=True, temperature=0, logit_bias=never):
                n += 1
                if time.perf_counter() - begin >= seconds:
                    break
        return n / (time.perf_counter() - begin)

    return turn


def share(_model: str, threads: int) -> Any:
    """A function of seconds: the part of that time that each of so many never waiting processes gets."""

    def turn(seconds: float) -> float:
        results = []
        for _ in range(threads):
            read, write = os.pipe()
            if os.fork() == 0:
                begin = time.process_time()
                end = time.perf_counter() + seconds
                while time.perf_counter() < end:
                    pass
                os.write(write, str((time.process_time() - begin) / seconds).encode())
                os._exit(0)
            os.close(write)
            results.append(read)
        parts = [float(os.read(read, 64)) for read in results]
        for read in results:
            os.close(read)
            os.wait()
        return sum(parts) / threads

    return turn


WORKERS = {"decode": decode, "chat": chat, "share": share}


class Worker:
    """One of these functions in a process of its own, which sleeps between its turns."""

    def __init__(self, kind: str, model: str, threads: int) -> None:
        command = [sys.executable, __file__, model, "--worker", kind, "-t", str(threads)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.kind, self.threads = kind, threads
        self._answer()

    def turn(self, seconds: float) -> float:
        assert self.process.stdin
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(
                f"error: [busy] expected {self.kind} with {self.threads} threads to run; it ended"
            )
        return line


def serve(kind: str, model: str, threads: int) -> None:
    turn = WORKERS[kind](model, threads)
    print("ready", flush=True)
    for line in sys.stdin:
        turn(float(line) / 4)
        print(turn(float(line)), flush=True)


def measured(model: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    workers = [Worker(kind, model, t) for t in map(int, args.threads.split(",")) for kind in WORKERS]
    found: dict[tuple[str, int, bool], list[float]] = {}
    for _ in range(args.rounds):
        for busy in (False, True):
            others = [
                subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
                for _ in range(args.beside if busy else 0)
            ]
            try:
                time.sleep(0.2)
                for worker in workers:
                    speed = worker.turn(args.seconds)
                    found.setdefault((worker.kind, worker.threads, busy), []).append(speed)
            finally:
                for other in others:
                    other.kill()
                    other.wait()
    middle = {key: statistics.median(values) for key, values in found.items()}
    return [row(worker, middle) for worker in workers if worker.kind != "share"]


def row(worker: Worker, middle: dict[tuple[str, int, bool], float]) -> dict[str, Any]:
    alone, beside = (middle[worker.kind, worker.threads, busy] for busy in (False, True))
    fair = middle["share", worker.threads, True] / middle["share", worker.threads, False]
    kept = beside / alone
    result = {"what": worker.kind, "threads": worker.threads, "alone": alone, "beside": beside}
    result |= {"kept": kept, "fair": fair, "of_fair": kept / fair}
    line = "{what:>6} -t {threads}: {alone:.1f} t/s alone, {beside:.1f} beside: {of_fair:.0%} of fair"
    print(line.format(**result))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help=f"{', '.join(real_models.MODELS)} or a GGUF")
    parser.add_argument("-t", "--threads", default="1,2")
    parser.add_argument("--beside", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn (default 2)")
    parser.add_argument("--rounds", type=int, default=5, help="(default 5)")
    parser.add_argument("--save", help="name of the result under bench/results")
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    model = str(real_models.model_path(args.model))
    if args.worker:
        serve(args.worker, model, int(args.threads))
        return 0
    rows = measured(model, args)
    if args.save:
        name = Path(model).name
        words = ["python", "bench/lab/busy.py", args.model if args.model in real_models.MODELS else name]
        words += ["-t", args.threads, "--beside", str(args.beside), "--save", args.save]
        cores = len(os.sched_getaffinity(0))
        note = f"`{name}`, {args.beside} programs beside on {cores} cores, median of {args.rounds} turns."
        save(RESULTS / f"{args.save}.json", command=shlex.join(words), columns=COLUMNS, rows=rows, note=note)
    return 0


if __name__ == "__main__":
    sys.exit(main())
