"""Hides numbers in a text: questions for bench/needles.py, in the form that models/demo was trained on.

python bench/hide.py models/demo/sample-val.txt -n 24 --chars 3000 -o build/needles.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

WORDS = ["warehouse", "letter", "cache", "river", "garden", "window", "engine", "paper", "number", "table"]


def hide(text: str, word: str, number: str, at: int) -> str:
    """The question: `text` with one sentence more, placed after the first full stop past character `at`."""
    at = text.index(". ", at) + 2
    text = f"{text[:at]}The magic number for {word} is {number}. {text[at:]}"
    return f"Read the text and remember the numbers.\n\n{text}\n\nWhat is the magic number for {word}?"


def questions(text: str, n: int, chars: int, seed: int = 0) -> list[dict[str, object]]:
    """`n` questions on passages of `chars` characters; the number stands in the first half of its passage."""
    rng = random.Random(seed)
    made: list[dict[str, object]] = []
    for _ in range(n):
        begin = rng.randrange(len(text) - chars)
        passage = text[begin : begin + chars]
        number = str(rng.randrange(1_000_000, 10_000_000))
        prompt = hide(passage, rng.choice(WORDS), number, rng.randrange(chars // 2))
        made.append({"prompt": prompt, "answer": number, "length": chars, "needles": 1})
    return made


def write_questions(text: str, n: int, chars: int, output: Path, seed: int = 0) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(question) + "\n" for question in questions(text, n, chars, seed)]
    output.write_text("".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path, help="UTF-8 text, longer than --chars")
    parser.add_argument("-n", type=int, default=24, help="questions")
    parser.add_argument("--chars", type=int, default=3000, help="characters per passage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    text = options.text.read_text(encoding="utf-8")
    write_questions(text, options.n, options.chars, options.output, options.seed)


if __name__ == "__main__":
    main()
