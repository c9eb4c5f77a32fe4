"""How many numbers hidden in a text a model finds, per cache format.

python bench/needles.py model.gguf --data needles.jsonl --kv f16,q4,q3 [--forced] [--hf DIR] [--json OUT]

Each line of the data is {"prompt", "answer", "length", "needles"} and perhaps "depth" (bench/inputs/hide.py).
The prompt goes in as a user message through the file's chat template, or as it is where there is none; the
answer counts when it contains the number. With --forced it counts when every token of the number is the
likeliest one, given the ones before it, which suits models that were trained to answer with the number alone.
--hf does the same with transformers on the checkpoint, --forced only.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from answering import answers
from command import arguments

LIMIT = 24  # tokens of an answer

Sample = dict[str, Any]
# tokens, first scored position -> likeliest token after each of tokens[first:], [len(tokens) - first]
Predict = Callable[[Sequence[int], int], NDArray[np.int64]]


def accuracy(samples: Sequence[Sample], hits: Sequence[bool]) -> dict[str, Any]:
    """Share of hits, in all, per length and per depth."""

    def by(key: str) -> dict[str, float]:
        groups: dict[float, list[bool]] = defaultdict(list)
        for sample, hit in zip(samples, hits, strict=True):
            groups[sample.get(key, 0)].append(hit)
        return {str(value): float(np.mean(of)) for value, of in sorted(groups.items())}

    found = {
        "accuracy": float(np.mean(hits)),
        "hits": int(np.sum(hits)),
        "samples": len(hits),
        "by_length": by("length"),
    }
    return found | ({"by_depth": by("depth")} if any("depth" in sample for sample in samples) else {})


def contains(text: str, number: str) -> bool:
    """Whether a text has the number, and not as a part of a longer one. Commas between digits do not count.

    >>> contains("It is 4,178,410.", "4178410"), contains("It is 41784100.", "4178410")
    (True, False)
    """
    plain = re.sub(r"(?<=\d),(?=\d)", "", text)
    return re.search(rf"(?<!\d){re.escape(number)}(?!\d)", plain) is not None


def asked(cache: answers.Cache, samples: Sequence[Sample], parallel: int) -> list[bool]:
    """Which numbers are in the greedy answers, `parallel` questions at a time."""
    chat = answers.Chat(cache.model)
    prompts = [chat.prompt(sample["prompt"], sample.get("lead", "")) for sample in samples]
    hits: list[bool] = []
    for begin in range(0, len(prompts), parallel):
        group = prompts[begin : begin + parallel]
        both = answers.Conversations(cache, len(group), sum(map(len, group)) + LIMIT * len(group))
        both.read(group)
        for tokens, sample in zip(both.answer(LIMIT), samples[begin : begin + parallel], strict=True):
            hits.append(contains(chat.text(tokens), sample["answer"]))
        progress(f"{len(hits)}/{len(samples)}, {np.mean(hits):.3f}")
    return hits


def forced(predict: Predict, prompt: Sequence[int], answer: Sequence[int]) -> bool:
    """Teacher forced: one pass over prompt and answer."""
    return predict([*prompt, *answer[:-1]], len(prompt) - 1).tolist() == list(answer)


def run_gguf(path: str, kv: str, samples: Sequence[Sample], args: argparse.Namespace) -> dict[str, Any]:
    from latentkv import _core

    options = {"kv": kv, "sink": args.sink, "recent": args.recent, "n_threads": args.threads}
    if args.forced:
        hits, bytes_per_token = _forced(path, options, samples, args)
    else:
        cache = answers.Cache(_core.Model(path, n_gpu_layers=args.gpu_layers), options)
        hits = asked(cache, samples, args.parallel)
        bytes_per_token = cache.session(1, 1).kv_bytes()["per_token"]
    return {
        "model": path,
        "kv": kv or "file",
        "kv_bytes_per_token": bytes_per_token,
        **accuracy(samples, hits),
    }


def _forced(
    path: str, options: dict[str, Any], samples: Sequence[Sample], args: argparse.Namespace
) -> tuple[list[bool], float]:
    from latentkv import Llama
    from latentkv.generate.chat import chat_prompt

    with Llama(path, vocab_only=True) as vocabulary:
        prompts = [chat_prompt(vocabulary, [{"role": "user", "content": s["prompt"]}]) for s in samples]
        wanted = [vocabulary.tokenize(s["answer"].encode(), add_bos=False) for s in samples]
    longest = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, wanted, strict=True))
    with Llama(path, n_ctx=args.ctx or longest, **options) as llama:

        def predict(tokens: Sequence[int], first: int) -> NDArray[np.int64]:
            cached = min(llama.reuse_prefix(tokens), first)
            llama.truncate(cached)
            llama.eval(tokens[cached:first])
            return llama.eval_all(tokens[first:]).argmax(axis=1)

        hits = []
        for i, (prompt, answer) in enumerate(zip(prompts, wanted, strict=True)):
            hits.append(forced(predict, prompt, answer))
            progress(f"{options['kv'] or 'file'}: {i + 1}/{len(samples)}, {np.mean(hits):.3f}")
        return hits, llama.kv_bytes()["per_token"]


def run_hf(path: str, samples: Sequence[Sample], args: argparse.Namespace) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(args.threads or torch.get_num_threads())
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def predict(tokens: Sequence[int], first: int) -> NDArray[np.int64]:
        with torch.inference_mode():
            logits = model(torch.tensor([list(tokens)])).logits[0, first:]
        best: NDArray[np.int64] = logits.argmax(dim=-1).numpy()
        return best

    hits = []
    for i, sample in enumerate(samples):
        message = [{"role": "user", "content": sample["prompt"]}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        answer = tokenizer(sample["answer"], add_special_tokens=False)["input_ids"]
        hits.append(forced(predict, prompt, answer))
        progress(f"transformers: {i + 1}/{len(samples)}, {np.mean(hits):.3f}")
    return {"model": path, "kv": "transformers", **accuracy(samples, hits)}


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("model", nargs="?", help="GGUF file")
    parser.add_argument("--data", required=True, help="JSON lines")
    parser.add_argument("--kv", default="", help="caches, comma separated (default: the file's)")
    parser.add_argument("--forced", action="store_true", help="every token of the number, teacher forced")
    parser.add_argument("--hf", metavar="DIR", help="also run transformers on this checkpoint (--forced)")
    parser.add_argument("--parallel", type=int, default=8, help="questions answered together (default 8)")
    parser.add_argument("--limit", type=int, help="only the first N samples")
    parser.add_argument(
        "-c", "--ctx", type=int, default=0, help="context (default: what the longest sample takes)"
    )
    parser.add_argument("--sink", type=int, default=-1)
    parser.add_argument("--recent", type=int, default=-1)
    parser.add_argument("-t", "--threads", type=int, default=0)
    parser.add_argument(
        "-ngl", "--gpu-layers", type=int, default=0, help="layers on the GPU, without --forced"
    )
    parser.add_argument("--json", metavar="OUT", help="write the result here instead of to standard output")
    args = parser.parse_args()
    if not args.model and not args.hf:
        parser.error("expected a GGUF file or --hf DIR")
    if args.hf and not args.forced:
        parser.error("expected --forced beside --hf; got none")
    if args.ctx and not args.forced:
        parser.error("expected --ctx with --forced only; got it without")
    lines = Path(args.data).read_text(encoding="utf-8").splitlines()
    samples = [json.loads(line) for line in lines if line.strip()][: args.limit]
    results = [run_gguf(args.model, kv, samples, args) for kv in args.kv.split(",")] if args.model else []
    if args.hf:
        results.append(run_hf(args.hf, samples, args))
    text = json.dumps({"data": args.data, "forced": args.forced, "results": results}, indent=2)
    progress("")
    if args.json:
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
