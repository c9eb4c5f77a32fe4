"""Random legal cache options on the GPU against the CPU: the same file, options and tokens on both.

    python bench/gpu/options.py MODEL.gguf … --rounds 20

Each combination of sink, recent, kv, kv_sink, kv_recent, n_seq_max and, for master files, kv_budget is a
process of its own, so that a crash is a row of the table. It decodes a prompt in pieces, single tokens and a
second sequence; the last logits of every call are compared by relative norm. Rows are made from hidden states
that differ in rounding, so values at the border of two codes get either: beside the difference stands what
the formats cost, the CPU's distance from f32 rows, and as much is allowed. Exits with 1 after a
difference or a crash. --cpu compares the CPU's kernels with the stock-ggml expression instead.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import random
import subprocess
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentkv import _core
from latentkv.plan.master import planned

FORMATS = ("", "", "f16", "q8", "q4", "q2", "q1", "q5", "q8_0")
# what the file asks for, none of it, one of both, both
WINDOWS: tuple[dict[str, int], ...] = (
    {},
    {"sink": 0, "recent": 0},
    {"sink": 4, "recent": 0},
    {"sink": 0, "recent": 32},
    {"sink": 5, "recent": 1},
)
BUDGETS = ("", "28%", "14%")
# tokens of a call and the sequences that they are of in turn
CALLS = (
    (1, (0,)),
    (1, (0,)),
    (150, (0,)),
    (1, (0,)),
    (9, (1,)),
    (6, (0, 1)),
    (1, (1,)),
    (40, (0,)),
    (1, (0,)),
)
ALLOWED = 5e-3  # and of what the formats cost:
ALLOWED_SHARE = 1.0  # two roundings of one cache are as far apart as either is from f32 rows


def combination(rng: random.Random, master: bool) -> dict[str, Any]:
    """Options as `Session` takes them, and kv_budget."""
    chosen: dict[str, Any] = dict(rng.choice(WINDOWS))
    budget = rng.choice(BUDGETS) if master else ""
    chosen["kv_budget" if budget else "kv"] = budget or rng.choice(FORMATS)
    for region in ("kv_sink", "kv_recent"):
        chosen[region] = rng.choice(FORMATS)
    chosen["n_seq_max"] = rng.choice((2, 2, 4))
    return {name: value for name, value in chosen.items() if value != ""}


def logits(model: _core.Model, options: dict[str, Any], **how: Any) -> NDArray[np.float64]:
    """[calls, n_vocab] after the last token of every call."""
    # a GPU settles what is not recent of longer ubatches at once, a CPU a ubatch later
    session = _core.Session(model, n_ctx=512, n_ubatch=128, prefill="eager", **planned(model, options), **how)
    rng = random.Random(1)
    length: dict[int, int] = {}
    rows = []
    for n, sequences in CALLS:
        seq = [sequences[i % len(sequences)] for i in range(n)]
        pos = []
        for s in seq:
            pos.append(length.get(s, 0))
            length[s] = pos[-1] + 1
        tokens = [rng.randrange(model.n_vocab) for _ in seq]
        rows.append(np.reshape(session.decode(tokens, pos=pos, seq=seq, output="last"), -1))
    return np.array(rows, np.float64)


def distance(got: NDArray[np.float64], want: NDArray[np.float64]) -> float:
    """Relative norm; infinite where anything is not finite."""
    error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    return error if np.isfinite(error) else float("inf")


def compare(path: str, options: dict[str, Any], on_cpu: bool) -> dict[str, float | str]:
    """Both sides of one combination, in this process."""
    faulthandler.enable()
    cpu = _core.Model(path)
    try:
        want = logits(cpu, options)
    except (ValueError, RuntimeError) as error:  # not a legal one
        return {"refused": str(error)}
    exact = {name: value for name, value in options.items() if name != "kv_budget"}
    exact |= {"kv": "f32", "kv_sink": "f32", "kv_recent": "f32"}
    cost = distance(want, logits(cpu, exact))
    if on_cpu:
        got = logits(cpu, options, implementation="reference")
    else:
        got = logits(_core.Model(path, n_gpu_layers=99), options)
    return {"error": distance(got, want), "cost": cost}


def in_process(path: str, options: dict[str, Any], on_cpu: bool) -> dict[str, Any]:
    """compare() in a process of its own; what ended it where nothing came back."""
    command = [sys.executable, __file__, path, "--one", json.dumps(options), *(["--cpu"] if on_cpu else [])]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        print(run.stderr, file=sys.stderr)
        return {"crash": f"status {run.returncode}"}
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


def verdict(result: dict[str, Any]) -> str:
    """`ok`, or why this row fails the run; a refusal of the CPU's does not."""
    if "refused" in result:
        return "refused"
    if "crash" in result:
        return f"CRASH {result['crash']}"
    return "ok" if result["error"] <= ALLOWED + ALLOWED_SHARE * result["cost"] else "DIFFERS"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("--rounds", type=int, default=20, help="combinations of every file")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--cpu", action="store_true", help="the CPU's kernels against the stock-ggml expression"
    )
    parser.add_argument("--one", metavar="JSON", help="this combination alone, as a JSON line")
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(compare(args.models[0], json.loads(args.one), args.cpu)))
        return
    if not args.cpu and not _core.build_info()["cuda"]:
        sys.exit("[gpu_options] expected a build with CUDA; got one without; use --cpu")
    failed = 0
    for path in args.models:
        rng = random.Random(args.seed)
        master = _core.Model(path).master is not None
        print(f"{path}\n{'':10} {'error':>9} {'formats':>9}  options")
        for i in range(args.rounds):
            # the one that most files are opened with beside their own first
            drawn = {"n_seq_max": 2, "sink": 0, "recent": 0} if i == 0 else combination(rng, master)
            result = in_process(path, drawn, args.cpu)
            said = verdict(result)
            failed += said not in ("ok", "refused")
            numbers = [f"{result[name]:9.2e}" if name in result else f"{'':9}" for name in ("error", "cost")]
            words = result.get("refused", " ".join(f"{name}={value}" for name, value in drawn.items()))
            print(f"{said:10} {numbers[0]} {numbers[1]}  {words}", flush=True)
    if failed:
        sys.exit(f"[gpu_options] expected every combination to agree; got {failed} that do not")


if __name__ == "__main__":
    main()
