"""How soon long greedy answers part from those of an f16 cache, and whether the prompt is still quoted.

    python bench/drift.py model.gguf --text TEXT [--kv q8_0,q4] [--against plain.gguf] [-n 64] [--tokens 700]

Questions are passages of the text with a request to explain them; after the answer the model is asked for one
sentence of the passage, whose first words it is given and whose others have to follow. Answers of the
reference (f16 rows of the same file, or of --against) come first. Two right caches part as well, where two
tokens are equally likely: so the reference answers twice, the second time in groups of half the size, whose
last bits differ.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from answering import answers
from answering.answers import Cache, Chat, Conversations
from command import arguments

CHARS = 900  # of a passage
QUOTE = 64  # tokens of a quotation
REQUEST = "Explain in detail, with examples, what this text says:"


@dataclass(frozen=True)
class Question:
    prompt: str
    sentence: str  # of the prompt, to be quoted

    @property
    def request(self) -> str:
        return "Repeat, word for word, the sentence of the text that begins as follows."

    @property
    def lead(self) -> str:
        """How the quotation begins, put into the model's mouth: a small one cannot be asked for more."""
        return " ".join(self.sentence.split()[:5])

    def is_quoted(self, answer: str) -> bool:
        return self.sentence in " ".join(f"{self.lead}{answer}".split())


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    quoted: bool


def questions(text: str, n: int, seed: int = 0) -> list[Question]:
    """Passages of CHARS characters that begin with a sentence and have a plain one to quote, at least half of
    CHARS apart."""
    rng = random.Random(seed)
    begins = [match.end() for match in re.finditer(r"(\n\n|[.] +)(?=[A-Z])", text[:-CHARS])]
    rng.shuffle(begins)
    taken: list[int] = []
    made = []
    for begin in begins:
        if any(abs(begin - other) < CHARS // 2 for other in taken):
            continue
        passage = " ".join(text[begin : begin + CHARS].split())
        sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z])", passage)[:-1]
        prompt = f"{REQUEST}\n\n{' '.join(sentences)}"
        plain = [each for each in sentences if re.fullmatch(r"[A-Z][\w ,;'\"()-]{40,160}[.]", each)]
        sure = [each for each in plain if prompt.count(Question(prompt, each).lead) == 1]
        if sure:
            taken.append(begin)
            made.append(Question(prompt, rng.choice(sure)))
        if len(made) == n:
            return made
    raise SystemExit(f"error: [drift] expected {n} passages in the text; got {len(made)}; lower -n")


def answered(cache: Cache, asked: Sequence[Question], limit: int, parallel: int) -> list[Answer]:
    """Answers of up to `limit` tokens, `parallel` at a time."""
    chat = Chat(cache.model)
    made: list[Answer] = []
    for begin in range(0, len(asked), parallel):
        group = asked[begin : begin + parallel]
        prompts = [chat.prompt(question.prompt) for question in group]
        requests = [chat.again(question.request, question.lead) for question in group]
        longest = sum(map(len, prompts + requests)) + (limit + QUOTE + 1) * len(group)
        both = Conversations(cache, len(group), longest)
        both.read(prompts)
        said = both.answer(limit)
        both.read(requests)
        for question, tokens, quotation in zip(group, said, both.answer(QUOTE), strict=True):
            made.append(Answer(tokens, question.is_quoted(chat.text(quotation))))
        print(f"\r\x1b[K{len(made)}/{len(asked)} answers", end="", file=sys.stderr, flush=True)
    print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return made


def first_difference(a: Sequence[int], b: Sequence[int], limit: int) -> int:
    """Tokens before the first that differs; an end is a token too. `limit`: the answers are the same.

    >>> first_difference([1, 2, 3], [1, 2, 4], 9), first_difference([1], [1, 2], 9)
    (2, 1)
    >>> first_difference([1], [1], 9)
    9
    """
    for at, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return at
    return limit if len(a) == len(b) else min(len(a), len(b))


def compared(reference: Sequence[Answer], found: Sequence[Answer], limit: int) -> dict[str, Any]:
    """Medians and means over the answers."""
    pairs = [(x.tokens, y.tokens) for x, y in zip(reference, found, strict=True)]
    equal = [sum(x == y for x, y in zip(*pair, strict=False)) / max(1, *map(len, pair)) for pair in pairs]
    return {
        "first_difference": float(np.median([first_difference(*pair, limit) for pair in pairs])),
        "same": float(np.mean([x == y for x, y in pairs])),
        "equal": float(np.mean(equal)),
        "length": float(np.mean([len(y) for _, y in pairs])),
        "quoted": int(sum(answer.quoted for answer in found)),
        "answers": len(found),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("model", help="GGUF file")
    parser.add_argument("--text", type=Path, required=True, help="passages are taken from it")
    parser.add_argument("--kv", default="", help="row formats, comma separated (default: the file's)")
    parser.add_argument("--against", metavar="GGUF", help="f16 rows of this file (default: of the model)")
    parser.add_argument("--sink", type=int, default=-1)
    parser.add_argument("--recent", type=int, default=-1)
    parser.add_argument("-n", type=int, default=64, help="answers (default 64)")
    parser.add_argument("--tokens", type=int, default=700, help="of an answer at most (default 700)")
    parser.add_argument("--parallel", type=int, default=64, help="answers at a time (default 64)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-t", "--threads", type=int, default=0)
    parser.add_argument("-ngl", "--gpu-layers", type=int, default=0)
    parser.add_argument("--json", metavar="OUT", help="write the result here instead of to standard output")
    args = parser.parse_args()
    from latentkv import _core
    from latentkv.plan.formats import split_pair

    asked = questions(args.text.read_text(encoding="utf-8"), args.n, args.seed)
    model = _core.Model(args.model, n_gpu_layers=args.gpu_layers)
    plain = _core.Model(args.against, n_gpu_layers=args.gpu_layers) if args.against else model
    threads = {"n_threads": args.threads, "n_threads_batch": args.threads}
    f16 = Cache(plain, {"kv": "f16", "sink": 0, "recent": 0} | threads)
    reference = answered(f16, asked, args.tokens, args.parallel)
    again = answered(f16, asked, args.tokens, max(1, args.parallel // 2))
    rows = [{"kv": "f16 again"} | compared(reference, again, args.tokens)]
    for kv in args.kv.split(","):
        both, k, v = split_pair(kv)
        options = {"kv": both, "kv_k": k, "kv_v": v, "sink": args.sink, "recent": args.recent}
        found = answered(answers.Cache(model, options | threads), asked, args.tokens, args.parallel)
        rows.append({"kv": kv or "file"} | compared(reference, found, args.tokens))
    text = json.dumps({"model": args.model, "tokens": args.tokens, "results": rows}, indent=2)
    if args.json:
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
