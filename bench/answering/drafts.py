"""What guesses are worth in a server: tokens per second of edits of code and of prose, with and without.

    python bench/answering/drafts.py qwen-coder --requests 4 --tokens 200 --save drafts-qwen-coder

Two servers of one model, one of which drafts nothing, answer the same requests by turns, one at a time and
greedily. An edit's answer repeats most of a function of its prompt; prose repeats little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/

from gpu import speculative
from inputs import real_models
from record import RESULTS, Column, save
from serving import started

PROSE = (
    "Tell the story of a lighthouse keeper who finds a letter in a bottle.",
    "Explain to a child why the sky is blue and sunsets are red.",
    "Describe a market in a small town on a rainy morning.",
    "Give three reasons why people keep diaries, with a short paragraph on each.",
)
COLUMNS = [
    Column("kind", "answers"),
    Column("cache", "cache"),
    Column("plain", "tokens/s without guesses", ".1f"),
    Column("drafted", "with", ".1f"),
    Column("gain", "gain", ".2f", "x"),
    Column("accepted", "guesses accepted", ".0f", "%"),
    Column("same", "equal answers", ".0f", "%"),
]


def answer(address: str, prompt: str, tokens: int) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "temperature": 0}
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=1800) as response:
        found: dict[str, Any] = json.load(response)
    return found


def row(kind: str, cache: str, pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """pairs: an answer without guesses and one with."""

    def speed(each: dict[str, Any]) -> float:
        return float(each["timings"]["predicted_per_second"])

    made = sum(drafted["timings"].get("draft_n", 0) for _, drafted in pairs)
    right = sum(drafted["timings"].get("draft_n_accepted", 0) for _, drafted in pairs)
    texts = [[each["choices"][0]["message"]["content"] for each in pair] for pair in pairs]
    return {
        "kind": kind,
        "cache": cache,
        "plain": statistics.harmonic_mean([speed(plain) for plain, _ in pairs]),
        "drafted": statistics.harmonic_mean([speed(drafted) for _, drafted in pairs]),
        "gain": statistics.geometric_mean([speed(drafted) / speed(plain) for plain, drafted in pairs]),
        "accepted": 100 * right / made if made else None,
        "same": 100 * statistics.mean(plain == drafted for plain, drafted in texts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help=f"{', '.join(real_models.MODELS)} or a GGUF")
    parser.add_argument("--kv", default="", help="a cache type (default: the file's own)")
    parser.add_argument("--cache", default="", help="what the table calls the cache (default: its type)")
    parser.add_argument("--requests", type=int, default=4, help="of each kind (default 4)")
    parser.add_argument("--tokens", type=int, default=200, help="of an answer (default 200)")
    parser.add_argument("--chars", type=int, default=speculative.CONTEXT, help="of a module before an edit")
    parser.add_argument("-c", "--ctx-size", type=int, default=8192)
    parser.add_argument("-t", "--threads", type=int, default=0)
    parser.add_argument("-ngl", "--gpu-layers", default="0")
    parser.add_argument("--save", metavar="NAME", help="adds its rows to bench/results/NAME.json")
    args = parser.parse_args()
    path = real_models.model_path(args.model)
    options = ["-np", "1", "-c", str(args.ctx_size), "-t", str(args.threads), "-ngl", args.gpu_layers]
    options += ["--kv", args.kv] if args.kv else []
    kinds = {"edits": speculative.requests(args.requests, args.chars), "prose": list(PROSE[: args.requests])}
    cache = args.cache or args.kv or "f16"
    rows = []
    with ExitStack() as stack:
        plain, drafting = (
            stack.enter_context(
                started([sys.executable, "-m", "latentkv"], str(path), [*options, "--draft-max", most])
            )[0]
            for most in ("0", "15")
        )
        for kind, prompts in kinds.items():
            pairs = []
            for prompt in prompts:
                pairs.append((answer(plain, prompt, args.tokens), answer(drafting, prompt, args.tokens)))
            rows.append(row(kind, cache, pairs))
            print(json.dumps(rows[-1]), flush=True)
    if args.save:
        out: Path = RESULTS / f"{args.save}.json"
        old = json.loads(out.read_text(encoding="utf-8"))["rows"] if out.exists() else []
        kept = [each for each in old if each["cache"] != cache]
        command = f"python bench/answering/drafts.py {args.model}" + (f" --kv {args.kv}" if args.kv else "")
        command += (
            f" --requests {args.requests} --tokens {args.tokens} --chars {args.chars} --save {args.save}"
        )
        save(out, command=command, columns=COLUMNS, rows=kept + rows)


if __name__ == "__main__":
    main()
