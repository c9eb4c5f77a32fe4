"""What a cache costs speculative decoding: guesses of prompt lookup that it accepts, and tokens per second.

    python bench/gpu/speculative.py plain.gguf --kv f16,q8_0,q4_0 --file 14%=small.gguf

Requests are edits of code: a module of Python's library, one of its functions, and what to change in it. The
answer repeats most of the function, so what followed the same two tokens before is guessed
(LlamaPromptLookupDecoding) and checked in one step. Greedy answers, with guesses and without.
"""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import heapq
import inspect
import json
import shlex
import statistics
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/

from answering.answers import Chat
from command import arguments
from latentkv import Llama, LlamaPromptLookupDecoding
from record import RESULTS, Column, save

CONTEXT = 9000  # characters of a module
EDITS = (
    "Add type annotations to all parameters and the return value.",
    "Rename the first parameter to `subject`, everywhere in the function.",
    "Raise a TypeError at the start if the first argument is None.",
    "Put a comment above every loop that says what it does.",
)
FUNCTIONS: tuple[Callable[..., Any], ...] = (
    textwrap.dedent,
    heapq.merge,
    shlex.shlex.read_token,
    statistics.quantiles,
    difflib.get_close_matches,
    fnmatch.filter,
    difflib.unified_diff,
    heapq.nsmallest,
)
COLUMNS = [
    Column("cache", "cache"),
    Column("accepted", "guesses accepted", ".0f", "%"),
    Column("per_step", "tokens a step", ".2f"),
    Column("fast", "tokens/s with guesses", ".0f"),
    Column("slow", "without", ".0f"),
    Column("gain", "gain", ".2f", "x"),
    Column("same", "answer as f16's for", ".0f", "%"),
]


def requests(n: int, chars: int = CONTEXT) -> list[str]:
    found = []
    for i in range(n):
        function = FUNCTIONS[i % len(FUNCTIONS)]
        edit = EDITS[(i + i // len(FUNCTIONS)) % len(EDITS)]
        module = inspect.getsource(sys.modules[function.__module__])
        source = textwrap.dedent(inspect.getsource(function))
        found.append(
            f"A module:\n\n```python\n{module[:chars]}\n```\n\n"
            f"One of its functions:\n\n```python\n{source}```\n\n"
            f"{edit} Answer with the whole function in one code block, and change nothing else."
        )
    return found


class Counted(LlamaPromptLookupDecoding):
    """Counts what becomes of its guesses, by what the next call finds behind them."""

    def __init__(self, n_guesses: int) -> None:
        super().__init__(num_pred_tokens=n_guesses)
        self.steps = self.made = self.accepted = 0
        self._guess: list[int] = []
        self._length = 0

    def __call__(self, input_ids: NDArray[np.intc], /, **kwargs: Any) -> NDArray[np.intc]:
        came = input_ids[self._length :].tolist()
        right = next((i for i, (a, b) in enumerate(zip(self._guess, came, strict=False)) if a != b), None)
        self.accepted += min(len(self._guess), len(came)) if right is None else right
        guess = super().__call__(input_ids, **kwargs)
        self.steps += 1
        self.made += guess.size
        self._guess, self._length = guess.tolist(), input_ids.size
        return guess

    def end(self) -> None:
        """Behind an answer, whose last guesses nobody looked at."""
        self.made -= len(self._guess)
        self.steps -= 1
        self._guess, self._length = [], 0


def answers(
    path: Path, options: dict[str, Any], draft: Counted | None, args: argparse.Namespace
) -> dict[str, Any]:
    """Tokens of every answer, and how many came in a second behind the first step, which builds a graph."""
    llm = Llama(
        str(path), n_ctx=args.ctx_size, n_gpu_layers=args.layers, draft_model=draft, verbose=False, **options
    )
    chat = Chat(llm.model)
    found: list[list[int]] = []
    n, seconds = 0, 0.0
    for request in requests(args.requests):
        tokens: list[int] = []
        prompt = chat.prompt(request)
        for token in llm.generate(prompt, temp=0.0, repeat_penalty=1.0):
            if llm.model.is_eog(token) or len(tokens) == args.tokens:
                break
            tokens.append(token)
        timings = llm.evaluator.timings
        n, seconds = n + timings.predicted_n, seconds + timings.predicted_s
        found.append(tokens)
        if draft is not None:
            draft.end()
    llm.close()
    return {"tokens": found, "per_second": n / seconds}


def same(a: list[list[int]], b: list[list[int]]) -> float:
    """The share of the tokens of b before a differs."""
    equal = total = 0
    for x, y in zip(a, b, strict=True):
        pairs = [i != j for i, j in zip(x, y, strict=False)]
        equal += pairs.index(True) if True in pairs else len(pairs)
        total += len(y)
    return equal / max(1, total)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("model", type=Path, help="a plain GGUF")
    parser.add_argument(
        "--file", action="append", default=[], metavar="NAME=PATH", help="a converted file, by its own plan"
    )
    parser.add_argument("--kv", default="f16,q8_0,q4_0", help="caches of the plain file, f16 first")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=400, help="of an answer, at most")
    parser.add_argument("--guesses", type=int, default=7, help="a step checks one more (default 7)")
    parser.add_argument("--ctx-size", type=int, default=6144)
    parser.add_argument("--layers", type=int, default=-1, help="on the GPU (default: all)")
    parser.add_argument("--save", metavar="NAME", help="bench/results/NAME.json")
    args = parser.parse_args()
    caches: list[tuple[str, Path, dict[str, Any]]] = [
        (kv, args.model, {"kv_k": kv, "kv_v": kv}) for kv in args.kv.split(",")
    ]
    for name, path in (file.split("=", 1) for file in args.file):
        caches.append((name, Path(path), {}))
    rows: list[dict[str, Any]] = []
    reference: list[list[int]] = []
    for name, path, options in caches:
        draft = Counted(args.guesses)
        fast = answers(path, options, draft, args)
        slow = answers(path, options, None, args)
        reference = reference or slow["tokens"]
        rows.append(
            {
                "cache": name,
                "accepted": 100 * draft.accepted / max(1, draft.made),
                "per_step": 1 + draft.accepted / max(1, draft.steps),
                "fast": fast["per_second"],
                "slow": slow["per_second"],
                "gain": fast["per_second"] / slow["per_second"],
                "same": 100 * same(slow["tokens"], reference),
                "answer_tokens": sum(map(len, slow["tokens"])),
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    if args.save:
        note = (
            f"{args.model.name}: {args.requests} edits of Python code, greedy, {args.guesses} guesses a step."
        )
        command = "python bench/gpu/speculative.py " + " ".join(sys.argv[1:])
        save(RESULTS / f"{args.save}.json", command=command, columns=COLUMNS, rows=rows, note=note)
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
