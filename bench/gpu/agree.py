"""Whether many sequences a step say what each says alone: every kind of file on a GPU, by divergence.

    python bench/gpu/agree.py --work build/agree --save agree-h200

Sequences of a real text are decoded one by one, then together, from the same rows bit for bit: n tokens a
step, one of each, and a piece of one sequence's prompt beside the others' tokens. That is done where all
tokens are in the exact windows, where some have left them, and where most have. A cell of the table is a kind
of file, n, and the length of the piece; its value is the largest mean divergence of all depths.

What rounding does is measured beside it. Weights are held in f32, as products with quantized weights round
activations to 8 bits; the same cells with f32 rows show what is left. In rows of few bits a rounding becomes
another code: what that does is seen where sequences, alone as before, are decoded from the same rows with
weights in f16. Exits with 1 where a cell is beyond both. No figure of a GPU is published without this table
of the same commit.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import time
from concurrent import futures
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/

from command import arguments
from gpu import cuda
from inputs import real_models, texts
from latentkv import _core
from latentkv.plan.master import planned
from latentkv.sampling.logprobs import log_softmax
from record import RESULTS, ROOT, Column, cell, save

SEQUENCES = (1, 2, 4, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64)
PIECES = (1, 16, 17, 64, 65)
# Tokens of a sequence. Windows have 128 or 256: all are exact; behind windows slots of all sequences are read
# together; deeper each token reads its own.
DEPTHS = (48, 224, 416, 800)
# Steps from the same rows: how many tokens the last sequence adds, beside one of each other. Of one token the
# third step is the first that a recording serves. Once a sequence has added 32 tokens, the oldest ones of all
# leave the exact windows: so it begins again before that.
RUNS = ((1, 1, 1, 1, 1, 16), (17,), (64,), (65,))
SINGLES = (1,) * max(map(len, RUNS))
MOST = max(map(sum, RUNS))
LEAST = 3e-6  # nats that no cell is held to
OF_ROUNDING = 4.0  # how often what f32 rows differ by is allowed, and what f16 weights do to the same rows
OF_NOISE = 2.0

GROWING = " growing"  # of a kind's name
RANDOM = "tiny-mla"  # bench/inputs/random_model.py writes it

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # kinds run beside each other

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Kind:
    model: str
    name: str
    kv: str = ""  # a cache type for the plain file
    convert: tuple[str, ...] = ()  # or options that make the file

    @property
    def grows(self) -> bool:
        """Its window: more than that is exact, beside compressed tokens."""
        return self.name.endswith(GROWING)

    @property
    def file(self) -> str:
        name = self.name.removesuffix(GROWING).replace(" ", "-")
        return f"{self.model}-{name}.gguf" if self.convert else f"{self.model}.gguf"

    def growing(self) -> Kind:
        return replace(self, name=self.name.removesuffix(" rows") + GROWING)


def _of(model: str, kvs: tuple[str, ...], converted: dict[str, tuple[str, ...]]) -> list[Kind]:
    plain = [Kind(model, f"{kv} rows", kv=kv) for kv in ("f32", *kvs)]
    return plain + [Kind(model, name, convert=options) for name, options in converted.items()]


def _speed(*budgets: str) -> dict[str, tuple[str, ...]]:
    return {f"speed {budget}": ("--kv-budget", f"{budget}%") for budget in budgets}


SIZE = {"size 14": ("--kv-budget", "14%", "--prefer", "size")}
SMOLLM2 = _of(
    "smollm2",
    ("f16", "q8_0", "q4_0", "balanced", "small", "smaller", "smallest"),
    _speed("28", "14", "8.5") | SIZE,
)
KINDS = (
    SMOLLM2
    + [kind.growing() for kind in SMOLLM2 if kind.name in ("small rows", "speed 28", "speed 14")]
    + _of("gemma3-270m", ("f16", "q8_0"), _speed("14") | SIZE)
    + _of("demo-hybrid", ("f16", "q8_0"), _speed("14") | SIZE)
    + _of(RANDOM, ("f16", "q8_0"), {"plan 14": ("--plan", "14")})
)


def made(kind: Kind, work: Path, device: str) -> Path:
    """The kind's file, converted where it is not there yet; of a cache type the model's own."""
    path = work / kind.file
    if kind.model in real_models.MODELS and not kind.convert:
        return real_models.model_path(kind.model)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two kinds may have one file
        return path if path.exists() else _made(kind, path, work, device)


def _made(kind: Kind, path: Path, work: Path, device: str) -> Path:
    if kind.model == RANDOM:
        program = str(Path(__file__).resolve().parent.parent / "inputs" / "random_model.py")
        return _written([program, RANDOM], path, list(kind.convert))
    if kind.convert:
        options = [*kind.convert, "--quick", "--device", device]
        return _converted(made(Kind(kind.model, "f16 rows", kv="f16"), work, device), path, options)
    return _converted(ROOT / "models" / kind.model, path, ["--method", "none"])


def _converted(source: Path, path: Path, options: list[str]) -> Path:
    return _written(["-m", "latentkv", "convert", str(source), "-o"], path, ["--no-plot", *options])


def _written(program: list[str], path: Path, options: list[str]) -> Path:
    partial = path.with_suffix(".part.gguf")
    done = subprocess.run([sys.executable, *program, str(partial), *options], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: [agree] expected to write {path.name}; got {done.stderr.strip()[-300:]}")
    partial.replace(path)
    return path


@dataclass
class Sequence:
    """One sequence at a depth: its rows, and what it says alone."""

    state: bytes
    tokens: list[int]  # all of its text; `depth` of them are in the state
    depth: int
    steps: list[Logits]  # log-probabilities of single tokens behind the state, [n_vocab] each
    pieces: list[list[Logits]]  # of the last tokens of RUNS


class Depth:
    """A session whose sequences have about the same length.

    Where windows grow, states are made in a context that the sequence nearly fills, so that it has exact
    tokens and compressed ones, and are read in one so large that nothing else leaves.
    """

    def __init__(self, model: _core.Model, of: Kind, text: list[int], depth: int, most: int) -> None:
        room = depth + MOST + 32
        options: dict[str, Any] = {
            "n_ctx": most * room * (8 if of.grows else 1),
            "n_seq_max": most,
            "prefill": "eager",
            "n_threads": 1,
            "fixed_window": not of.grows,
        } | ({"kv": of.kv} if of.kv else {})
        self.session = _core.Session(model, **planned(model, options))
        self.maker = self.session
        if of.grows:
            self.maker = _core.Session(model, **planned(model, options | {"n_ctx": room, "n_seq_max": 1}))
        self.of, self.depth, self.text, self.most = of, depth, text, most
        self.sequences: list[Sequence] = []

    def add(self, n: int, with_pieces: bool) -> None:
        """Sequence n, which others' rows are not beside."""
        depth = self.depth + n % 5
        start = (n * 331) % (len(self.text) - depth - MOST)
        tokens = self.text[start : start + depth + MOST]
        self.maker.clear()
        self.maker.decode(tokens[:depth], output="none")
        sequence = Sequence(self.maker.seq_state_bytes(0), tokens, depth, [], [])
        sequence.steps = self.alone(sequence, SINGLES)
        if with_pieces:
            sequence.pieces = [self.alone(sequence, run) for run in RUNS]
        self.sequences.append(sequence)

    def alone(self, sequence: Sequence, lengths: tuple[int, ...]) -> list[Logits]:
        """What it says behind its rows, after each of some pieces of its text."""
        self.session.clear()
        self.session.set_seq_state(0, sequence.state)
        found, at = [], sequence.depth
        for length in lengths:
            found.append(self._next(sequence.tokens[at : at + length]))
            at += length
        return found

    def noise(self, other: _core.Model) -> list[float]:
        """Divergence of what sequences with pieces say alone with another model's weights, a token each."""
        beside = Depth(other, self.of, self.text, self.depth, self.most)  # rings depend on n_ctx
        values = []
        for sequence in self.sequences:
            for run, alone in zip(RUNS, sequence.pieces, strict=False):
                got = beside.alone(sequence, run)
                values += [divergence(*pair) for pair in zip(got, alone, strict=True)]
        return values

    def _next(self, tokens: list[int]) -> Logits:
        return log_softmax(self.session.decode(tokens)).reshape(-1).astype(np.float32)

    def together(self, n: int, pieces: tuple[int, ...]) -> dict[int, list[tuple[Logits, Logits]]]:
        """Of n sequences: by the length of the piece, (got, alone) of every token that has logits."""
        found: dict[int, list[tuple[Logits, Logits]]] = {piece: [] for piece in pieces}
        sequences = self.sequences[:n]
        for number, run in enumerate(RUNS):
            if not set(run) & set(pieces):
                continue
            self.session.clear()
            for s, sequence in enumerate(sequences):
                self.session.set_seq_state(s, sequence.state)
            done = 0
            for step, piece in enumerate(run):
                tokens: list[int] = []
                seq: list[int] = []
                wanted: list[bool] = []
                for s, sequence in enumerate(sequences):
                    length, behind = (piece, done) if s == n - 1 else (1, step)
                    at = sequence.depth + behind
                    tokens += sequence.tokens[at : at + length]
                    seq += [s] * length
                    wanted += [False] * (length - 1) + [True]
                done += piece
                got = self.session.decode(tokens, seq=seq, output=wanted)
                alone = [sequence.steps[step] for sequence in sequences[:-1]]
                alone.append(sequences[-1].pieces[number][step])
                if piece in pieces:
                    found[piece] += list(zip(got, alone, strict=True))
        return found


def divergence(got: Logits, alone: Logits) -> float:
    """Nats between logits and log-probabilities; infinite where anything is not finite."""
    if not np.isfinite(got).all():
        return float("inf")
    return float(np.exp(alone, dtype=np.float64) @ (alone - log_softmax(got.reshape(1, -1)).reshape(-1)))


def measured(kind: Kind, args: argparse.Namespace) -> dict[str, Any]:
    """Of one kind, in a process of its own: what it says alone, and its cells by depth."""
    path = made(kind, args.work, args.device)
    gpu = args.device == "cuda"
    model = _core.Model(str(path), n_gpu_layers=99 if gpu else 0, weights="f32")
    if kind.model == RANDOM:
        text = np.random.default_rng(1).integers(0, model.n_vocab, 60000).tolist()
    else:
        text = model.tokenize(args.text.read_bytes())
    most = max(args.sequences)
    rounded = _core.Model(str(path), n_gpu_layers=99 if gpu else 0, weights="f16")
    cells: dict[str, list[tuple[float, int]]] = {}
    noise: list[list[float]] = []
    for depth in DEPTHS:
        at = Depth(model, kind, text, depth, most)
        if gpu and not at.session.implementations["latent_attn"].startswith("fused cuda"):
            got = at.session.implementations
            raise SystemExit(f"error: [agree] expected fused attention on the GPU; got {got}")
        for n in range(most):
            at.add(n, n + 1 in args.sequences)
        noise.append(at.noise(rounded))
        for n in args.sequences:
            for piece, pairs in at.together(n, args.pieces).items():
                found = [divergence(*pair) for pair in pairs]
                cells.setdefault(f"{n} {piece}", []).append((float(np.mean(found)), len(found)))
    return {"model": kind.model, "kind": kind.name, "cells": cells, "noise": noise}


def allowed(tokens: int, rounding: float, noise: list[float], most: float) -> float:
    """Nats of a mean over some tokens; one of them may be as far off as any of the kind that was seen.

    At one depth no code may have flipped: with an MLA file on an H200 at one of four only.
    """
    return LEAST + OF_ROUNDING * rounding + OF_NOISE * (float(np.mean(noise)) + most / tokens)


def rounded(values: list[float]) -> list[float]:
    """To three digits."""
    return [float(f"{value:.3g}") for value in values]


def judged(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a cell; its lists have a value a depth."""
    rows = []
    for result in results:
        model = result["model"]
        exact = next(of for of in results if of["model"] == model and of["kind"] == "f32 rows")
        flip = max(map(max, result["noise"]))
        for key, values in result["cells"].items():
            n, piece = map(int, key.split())
            klds = [kld for kld, _ in values]
            roundings = [kld for kld, _ in exact["cells"][key]]
            most = [
                allowed(tokens, rounding, noise, flip)
                for (_, tokens), rounding, noise in zip(values, roundings, result["noise"], strict=True)
            ]
            rows.append(
                {
                    "model": model,
                    "kind": result["kind"],
                    "sequences": n,
                    "piece": piece,
                    "kld": rounded(klds),
                    "rounding": rounded(roundings),
                    "allowed": rounded(most),
                    "noise": rounded([float(np.mean(result["noise"]))])[0],
                    "ok": all(kld <= limit for kld, limit in zip(klds, most, strict=True)),
                }
            )
    return rows


def table(rows: list[dict[str, Any]], sequences: tuple[int, ...]) -> list[dict[str, Any]]:
    """A row a kind: of every number of sequences the largest divergence over the pieces."""
    kinds = list(dict.fromkeys((row["model"], row["kind"]) for row in rows))
    lines = []
    for model, kind in kinds:
        own = [row for row in rows if (row["model"], row["kind"]) == (model, kind)]
        worst = {str(n): max(max(row["kld"]) for row in own if row["sequences"] == n) for n in sequences}
        off = sum(not row["ok"] for row in own)
        lines.append({"model": model, "kind": kind, **worst, "noise": own[0]["noise"], "off": off})
    return lines


def parser() -> argparse.ArgumentParser:
    of = arguments(__doc__)
    of.add_argument("--work", type=Path, default=Path("build/agree"), help="files on the way")
    of.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    of.add_argument("--models", default=",".join(dict.fromkeys(kind.model for kind in KINDS)))
    of.add_argument("--kinds", default="", help="names of kinds (f32 rows always), with commas between")
    of.add_argument("--text", type=Path, help="default: Python's language reference")
    of.add_argument("--sequences", default=",".join(map(str, SEQUENCES)))
    of.add_argument("--pieces", default=",".join(map(str, PIECES)))
    of.add_argument("--jobs", type=int, default=12, help="kinds beside each other (default 12)")
    of.add_argument("--save", metavar="NAME", help="bench/results/NAME.json")
    of.add_argument("--out", type=Path, help="the same, anywhere")
    of.add_argument("--one", type=int, metavar="N", help=argparse.SUPPRESS)
    return of


def main() -> int:
    args = parser().parse_args()
    args.sequences = tuple(map(int, args.sequences.split(",")))
    args.pieces = tuple(map(int, args.pieces.split(",")))
    args.work.mkdir(parents=True, exist_ok=True)
    if args.text is None:
        args.text = texts.write(args.work / "texts")[1]
    if args.one is not None:
        print(json.dumps(measured(KINDS[args.one], args)))
        return 0
    names = set(filter(None, args.kinds.split(","))) | {"f32 rows"}
    wanted = [
        at
        for at, kind in enumerate(KINDS)
        if kind.model in args.models.split(",") and (not args.kinds or kind.name in names)
    ]
    with futures.ThreadPoolExecutor(args.jobs) as pool:
        plain = [Kind(model, "f16 rows", kv="f16") for model in args.models.split(",")]
        list(pool.map(lambda kind: made(kind, args.work, args.device), plain))
    # The longest first: a conversion takes as long as cells do, and Gemma has five times as many tokens.
    wanted.sort(key=lambda at: (not KINDS[at].convert, "gemma" not in KINDS[at].model))
    results, failed = {}, 0

    def run(at: int) -> dict[str, Any] | str:
        words = [sys.executable, __file__, *sys.argv[1:], "--text", str(args.text), "--one", str(at)]
        done = subprocess.run(words, capture_output=True, text=True, env=os.environ | ONE_THREAD)
        return done.stderr.strip()[-500:] if done.returncode else json.loads(done.stdout.splitlines()[-1])

    begin = time.monotonic()
    with futures.ThreadPoolExecutor(args.jobs) as pool:
        running = {pool.submit(run, at): at for at in wanted}
        for done in futures.as_completed(running):
            at, result = running[done], done.result()
            failed += isinstance(result, str)
            if not isinstance(result, str):
                results[at] = result
                result = f"at most {max(kld for cell in result['cells'].values() for kld, _ in cell):.1e}"
            seconds = time.monotonic() - begin
            print(
                f"{seconds:.0f} s, {KINDS[at].model} {KINDS[at].name}: {result}", file=sys.stderr, flush=True
            )
    rows = judged([results[at] for at in sorted(results)])
    lines = table(rows, args.sequences)
    columns = [Column("model", "model"), Column("kind", "kind")]
    columns += [Column(str(n), str(n), ".1e") for n in args.sequences]
    columns += [Column("noise", "f16 weights", ".1e"), Column("off", "cells off")]
    print(" ".join(column.label for column in columns))
    for line in lines:
        print(" ".join(cell(line[column.key], column.format) for column in columns))
    off = [row for row in rows if not row["ok"]]
    for row in off[:20]:
        print(json.dumps(row), file=sys.stderr)
    out = args.out or (RESULTS / f"{args.save}.json" if args.save else None)
    if out is not None:
        name = cuda.ask_gpu("name") if args.device == "cuda" else "the CPU"
        note = f"{name}; nats by which sequences that share a step differ from one alone, by their number."
        command = "python bench/gpu/agree.py"
        save(out, command=command, columns=columns, rows=lines, note=note, cells=rows)
    print(f"{len(rows)} cells, {len(off)} off, {failed} kinds failed")
    return int(bool(off) or failed > 0)


if __name__ == "__main__":
    sys.exit(main())
