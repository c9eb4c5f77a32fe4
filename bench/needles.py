"""How many numbers hidden in a text a model finds, per cache format.

python bench/needles.py model.gguf --data needles.jsonl --kv f16,q4,q3 [--generate] [--hf DIR] [--json OUT]

Each line of the data is {"prompt", "answer", "length", "needles"}: the prompt goes in as a user message
through the file's chat template, and the answer counts when every token of it is the likeliest one, given the
ones before it (teacher forced) or as generated greedily (--generate). --hf does the same with transformers on
the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Sample = dict[str, Any]
# tokens, first scored position -> likeliest token after each of tokens[first:], [len(tokens) - first]
Predict = Callable[[Sequence[int], int], NDArray[np.int64]]


def accuracy(samples: Sequence[Sample], hits: Sequence[bool]) -> dict[str, Any]:
    """Share of hits, in all and per length."""
    by_length: dict[int, list[bool]] = defaultdict(list)
    for sample, hit in zip(samples, hits, strict=True):
        by_length[int(sample.get("length", 0))].append(hit)
    return {
        "accuracy": float(np.mean(hits)),
        "hits": int(np.sum(hits)),
        "samples": len(hits),
        "by_length": {str(length): float(np.mean(of)) for length, of in sorted(by_length.items())},
    }


def forced(predict: Predict, prompt: Sequence[int], answer: Sequence[int]) -> bool:
    """Teacher forced: one pass over prompt and answer."""
    return predict([*prompt, *answer[:-1]], len(prompt) - 1).tolist() == list(answer)


def generated(predict: Predict, prompt: Sequence[int], answer: Sequence[int]) -> bool:
    """Greedy: each token follows the model's own."""
    tokens = list(prompt)
    for wanted in answer:
        token = int(predict(tokens, len(tokens) - 1)[-1])
        if token != wanted:  # a wrong token cannot become right later
            return False
        tokens.append(token)
    return True


def run_gguf(path: str, kv: str, samples: Sequence[Sample], args: argparse.Namespace) -> dict[str, Any]:
    from latentkv import Llama
    from latentkv.chat import chat_prompt
    from latentkv.formats import split_pair

    with Llama(path, vocab_only=True) as vocabulary:
        prompts = [chat_prompt(vocabulary, [{"role": "user", "content": s["prompt"]}]) for s in samples]
        answers = [vocabulary.tokenize(s["answer"].encode(), add_bos=False) for s in samples]
    longest = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    both, k, v = split_pair(kv)
    options = {"sink": args.sink, "recent": args.recent, "n_threads": args.threads}
    with Llama(path, n_ctx=args.ctx or longest, kv=both, kv_k=k, kv_v=v, **options) as llama:

        def predict(tokens: Sequence[int], first: int) -> NDArray[np.int64]:
            cached = min(llama.reuse_prefix(tokens), first)
            llama.truncate(cached)
            llama.eval(tokens[cached:first])
            return llama.eval_all(tokens[first:]).argmax(axis=1)

        hits = []
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            hits.append((generated if args.generate else forced)(predict, prompt, answer))
            progress(f"{kv or 'file'}: {i + 1}/{len(samples)}, {np.mean(hits):.3f}")
        bytes_per_token = llama.kv_bytes()["per_token"]
    return {
        "model": path,
        "kv": kv or "file",
        "kv_bytes_per_token": bytes_per_token,
        **accuracy(samples, hits),
    }


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
        hits.append((generated if args.generate else forced)(predict, prompt, answer))
        progress(f"transformers: {i + 1}/{len(samples)}, {np.mean(hits):.3f}")
    return {"model": path, "kv": "transformers", **accuracy(samples, hits)}


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="GGUF file")
    parser.add_argument("--data", required=True, help="JSON lines")
    parser.add_argument("--kv", default="", help="row formats, comma separated (default: the file's)")
    parser.add_argument("--generate", action="store_true", help="greedy answers instead of teacher forcing")
    parser.add_argument("--hf", metavar="DIR", help="also run transformers on this checkpoint")
    parser.add_argument("--limit", type=int, help="only the first N samples")
    parser.add_argument(
        "-c", "--ctx", type=int, default=0, help="context (default: what the longest sample takes)"
    )
    parser.add_argument("--sink", type=int, default=-1)
    parser.add_argument("--recent", type=int, default=-1)
    parser.add_argument("-t", "--threads", type=int, default=0)
    parser.add_argument("--json", metavar="OUT", help="write the result here instead of to standard output")
    args = parser.parse_args()
    if not args.model and not args.hf:
        parser.error("expected a GGUF file or --hf DIR")
    lines = Path(args.data).read_text(encoding="utf-8").splitlines()
    samples = [json.loads(line) for line in lines if line.strip()][: args.limit]
    results = [run_gguf(args.model, kv, samples, args) for kv in args.kv.split(",")] if args.model else []
    if args.hf:
        results.append(run_hf(args.hf, samples, args))
    text = json.dumps({"data": args.data, "generate": args.generate, "results": results}, indent=2)
    progress("")
    if args.json:
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
