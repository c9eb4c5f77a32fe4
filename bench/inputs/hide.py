"""Hides numbers in a text: questions for bench/needles.py, in the form that models/demo was trained on.

python bench/inputs/hide.py models/demo/sample-val.txt -n 24 [--depths 0.1,0.5,0.9] -o build/needles.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

WORDS = ["warehouse", "letter", "cache", "river", "garden", "window", "engine", "paper", "number", "table"]


def hide(text: str, word: str, number: str, at: int) -> str:
    """The question: `text` with one sentence more, placed after the first full stop past character `at`, or
    the last one before it."""
    stop = text.find(". ", at)
    at = (stop if stop >= 0 else text.rindex(". ", 0, at)) + 2
    text = f"{text[:at]}The magic number for {word} is {number}. {text[at:]}"
    return f"Read the text and remember the numbers.\n\n{text}\n\nWhat is the magic number for {word}?"


def questions(
    text: str, n: int, chars: int, seed: int = 0, depths: Sequence[float] = ()
) -> list[dict[str, object]]:
    """`n` questions on passages of `chars` characters. The number stands in the first half of its passage; or
    each passage is asked once per depth, the share of it that comes before the number."""
    rng = random.Random(seed)
    made: list[dict[str, object]] = []
    while len(made) < n * max(1, len(depths)):
        begin = rng.randrange(len(text) - chars)
        passage = text[begin : begin + chars]
        if ". " not in passage:
            continue
        number = str(rng.randrange(1_000_000, 10_000_000))
        word, anywhere = rng.choice(WORDS), rng.randrange(chars // 2)
        for depth in depths or (None,):
            at = anywhere if depth is None else int(depth * chars)
            question: dict[str, object] = {
                "prompt": hide(passage, word, number, at),
                "answer": number,
                "lead": f"The magic number for {word} is",
                "length": chars,
                "needles": 1,
            }
            made.append(question if depth is None else question | {"depth": depth})
    return made


def write_questions(
    text: str, n: int, chars: int, output: Path, seed: int = 0, depths: Sequence[float] = ()
) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(question) + "\n" for question in questions(text, n, chars, seed, depths)]
    output.write_text("".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path, help="UTF-8 text, longer than --chars")
    parser.add_argument("-n", type=int, default=24, help="passages")
    parser.add_argument("--chars", type=int, default=3000, help="characters per passage")
    parser.add_argument("--depths", default="", help="ask each passage at these depths (0.1,0.5,0.9)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    text = options.text.read_text(encoding="utf-8")
    depths = [float(depth) for depth in options.depths.split(",") if depth]
    write_questions(text, options.n, options.chars, options.output, options.seed, depths)


if __name__ == "__main__":
    main()
