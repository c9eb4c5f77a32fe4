"""Hours of agents at a server: whether an answer is ever another one's, or nobody's.

    python bench/answering/day.py model.gguf --minutes 30 [--slots 3] [-c 6000] [options of `latentkv serve`]

More agents than sequences share a system prompt and ask greedily, at random: conversations grow, fork, are
cut to their end, or leave in the middle of an answer; some answers are JSON by a schema. The cache is too
small for them, so that what they begin with is dropped, kept in RAM and on disk, and restored. Afterwards
each answer is computed alone, from an empty cache: of every one of its tokens the logit has to be the
largest, but for rounding. How much less it is, is what batches of other sizes round: the same answers, asked
of a quiet server, say how much that is.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/

import record
from command import arguments
from record import Column
from serving import resident, started

COLUMNS = [
    Column("cache", "cache"),
    Column("minutes", "minutes", ".0f"),
    Column("answers", "answers"),
    Column("reused", "of prompts reused", ".0f", "%"),
    Column("left", "clients gone"),
    Column("broken", "JSON that is none"),
    Column("checked", "answers computed alone"),
    Column("wrong", "other answers"),
    Column("gap", "largest distance", ".2f"),
    Column("quiet", "of a quiet server", ".2f"),
    Column("grown", "memory grown", ".0f", "MiB"),
]
SCHEMA = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "maxLength": 12},
        "lines": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 4},
        "done": {"type": "boolean"},
    },
    "required": ["file", "lines", "done"],
    "additionalProperties": False,
}
WRONG = 1.0  # so much less than the largest logit no rounding makes one


@dataclass
class Answer:
    prompt: list[int]
    tokens: list[int]
    is_json: bool
    cached: int


@dataclass
class Day:
    """What clients do, until the time is over. text: tokens that they say."""

    address: str
    text: list[int]
    longest: int
    until: float
    answers: list[Answer] = field(default_factory=list)
    left: int = 0
    broken: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def agent(self, seed: int) -> None:
        rng = random.Random(seed)
        system = self.text[:300]
        said = list(system)
        with httpx.Client(base_url=self.address, timeout=None) as client:
            while time.monotonic() < self.until:
                said += self._some(rng, rng.choice((5, 20, 60, 200)))
                if len(said) > self.longest:
                    said = [*system, *said[-rng.choice((50, 200)) :]]
                if rng.random() < 0.1:
                    self._leave(client, said, rng)
                    continue
                answer = self._ask(client, said, rng.random() < 0.3, rng)
                if rng.random() < 0.8:  # else the conversation forks here
                    said = [*said, *answer.tokens]

    def _some(self, rng: random.Random, n: int) -> list[int]:
        at = rng.randrange(300, len(self.text) - n)
        return self.text[at : at + n]

    def _ask(self, client: httpx.Client, said: Sequence[int], is_json: bool, rng: random.Random) -> Answer:
        body: dict[str, Any] = {"prompt": list(said), "temperature": 0, "return_tokens": True}
        body |= (
            {"json_schema": SCHEMA, "n_predict": 120} if is_json else {"n_predict": rng.choice((8, 24, 48))}
        )
        found = client.post("/completion", json=body).raise_for_status().json()
        answer = Answer(list(said), found["tokens"], is_json, found["timings"].get("cache_n", 0))
        with self.lock:
            self.answers.append(answer)
            self.broken += is_json and found["stop_type"] != "limit" and not _is_json(found["content"])
        return answer

    def _leave(self, client: httpx.Client, said: Sequence[int], rng: random.Random) -> None:
        """In the prompt, or amid the answer."""
        body = {"prompt": list(said), "temperature": 0, "n_predict": 200, "stream": True}
        n = rng.choice((0, 3))
        with client.stream("POST", "/completion", json=body) as response:
            for _, _ in zip(range(n), response.iter_lines(), strict=False):
                pass
        with self.lock:
            self.left += 1


def _is_json(text: str) -> bool:
    try:
        return set(json.loads(text)) == set(SCHEMA["required"])
    except ValueError:
        return False


def distance(session: Any, answer: Answer) -> float:
    """Of the answer's tokens from the likeliest ones, the largest, in logits; alone in the cache."""
    session.clear()
    tokens = [*answer.prompt, *answer.tokens[:-1]]
    wanted = [at >= len(answer.prompt) - 1 for at in range(len(tokens))]
    logits = np.asarray(session.decode(tokens, output=wanted))
    taken = logits[np.arange(len(answer.tokens)), answer.tokens]
    return float((logits.max(axis=1) - taken).max())


def measured(args: argparse.Namespace, options: Sequence[str]) -> dict[str, Any]:
    from latentkv import Llama

    llama = Llama(str(args.model), n_ctx=args.ctx, n_threads=args.threads, **session_options(options))
    text = llama.tokenize(args.text.read_bytes()[:400000])
    with tempfile.TemporaryDirectory() as folder:
        own = [*options, "-t", str(args.threads), "--seed", "1"]
        busy = ["-np", str(args.slots), "-c", str(args.ctx), "--cache-ram", "64", "--cache-dir", folder]
        with started(args.command, str(args.model), [*own, *busy]) as (address, process):
            first: list[float] = []
            threading.Timer(args.minutes * 20, lambda: first.append(resident(process))).start()
            day = Day(address, text, args.longest, time.monotonic() + args.minutes * 60)
            with ThreadPoolExecutor(args.agents) as agents:
                list(agents.map(day.agent, range(args.agents)))
            grown = resident(process) - first[0]
    plain = [answer for answer in day.answers if not answer.is_json and answer.tokens]
    chosen = random.Random(0).sample(plain, min(args.check, len(plain)))
    gaps = [distance(llama.session, answer) for answer in chosen]
    with started(args.command, str(args.model), [*own, "-np", "1", "-c", str(args.ctx)]) as (address, _):
        quiet = Day(address, text, args.longest, 0)
        rng = random.Random(0)
        with httpx.Client(base_url=address, timeout=None) as client:
            again = [quiet._ask(client, answer.prompt, False, rng) for answer in chosen[: args.check // 4]]
    prompts = sum(len(answer.prompt) for answer in day.answers)
    return {
        "cache": args.name,
        "minutes": args.minutes,
        "answers": len(day.answers),
        "reused": 100 * sum(answer.cached for answer in day.answers) / max(1, prompts),
        "left": day.left,
        "broken": day.broken,
        "checked": len(chosen),
        "wrong": sum(gap > WRONG for gap in gaps),
        "gap": max(gaps, default=0.0),
        "quiet": max((distance(llama.session, answer) for answer in again if answer.tokens), default=0.0),
        "grown": grown,
    }


def session_options(options: Sequence[str]) -> dict[str, Any]:
    """Those of the server that the cache depends on."""
    found: dict[str, Any] = {}
    for at, option in enumerate(options):
        if option == "--fixed-window":
            found["fixed_window"] = True
        elif option in ("--kv", "--kv-budget"):
            found[option[2:].replace("-", "_")] = options[at + 1]
        elif option in ("--sink", "--recent"):
            found[option[2:]] = int(options[at + 1])
    return found


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--name", default="", help="of the cache, in the table")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--agents", type=int, default=5)
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("-c", "--ctx", type=int, default=4096, help="cells of all sequences")
    parser.add_argument("--longest", type=int, default=1500, help="tokens of a conversation")
    parser.add_argument("--check", type=int, default=60, help="answers that are computed alone")
    parser.add_argument("--text", type=Path, default=record.ROOT / "models" / "demo" / "sample-val.txt")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--command", nargs="+", default=[sys.executable, "-m", "latentkv"], help="latentkv's")
    parser.add_argument("--out", type=Path, help="JSON, to which a row is added")
    args, options = parser.parse_known_args()
    row = measured(args, options)
    print(json.dumps(row))
    rows = json.loads(args.out.read_text())["rows"] if args.out and args.out.exists() else []
    if args.out:
        record.save(
            args.out,
            command="python bench/answering/day.py MODEL",
            columns=COLUMNS,
            rows=[*rows, row],
            note="Agents at a server, and their answers computed alone",
        )
    return 1 if row["wrong"] or row["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
