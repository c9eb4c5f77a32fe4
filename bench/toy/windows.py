"""What the toy reads: one stream of token ids, and where windows of each kind begin in it."""

from __future__ import annotations

import itertools
import random
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentkv_convert.calibrate.text import mix

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 60_000  # characters of one file
ENDS = ("py", "md", "cpp", "h", "cu", "cuh")
FACTS = {"few": (2, 5), "more": (3, 12), "many": (12, 40)}  # numbers of one text
MADE = 8000  # texts of each of these
HIDDEN = 4000  # texts with numbers in prose
REPEATED = (8, 100)  # tokens of a row that is repeated
Tokens = NDArray[np.int64]
# Share of the time, tokens of a window, share of each kind: attention learns to repeat and to find on short
# windows, early.
STAGES: tuple[tuple[float, int, dict[str, float]], ...] = (
    (0.30, 256, {"text": 0.45, "repeated": 0.15, "few": 0.3, "more": 0.1}),
    (0.45, 1024, {"text": 0.65, "repeated": 0.02, "few": 0.03, "more": 0.15, "many": 0.05, "hidden": 0.1}),
    (0.25, 2048, {"text": 0.65, "more": 0.15, "many": 0.1, "hidden": 0.1}),
)


def texts() -> Iterator[str]:
    """Modules and chapters that nothing is measured on, and this repository."""
    held_out = set(mix.MODULES[mix.HELD_OUT].split())
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        name = ".".join(path.relative_to(library).with_suffix("").parts).removesuffix(".__init__")
        if name not in held_out and not {"site-packages", "idlelib"} & set(path.parts):
            yield path.read_text(encoding="utf-8", errors="ignore")[:LONGEST]
    yield from mix.chapters(held_out=False) * 4  # prose is a small part of all
    for folder, end in itertools.product(("bench", "docs", "native", "python", "tests", "tools"), ENDS):
        for path in sorted((ROOT / folder).rglob(f"*.{end}")):
            yield path.read_text(encoding="utf-8", errors="ignore")[:LONGEST]


def facts(rng: random.Random, n: int) -> dict[str, str]:
    names = rng.sample([f"{side} {place}" for side in mix.SIDES for place in mix.PLACES], n)
    return {name: str(rng.randrange(10_000, 10_000_000)) for name in names}


def asked(rng: random.Random, fewest: int, most: int) -> str:
    """Facts with numbers, then the same numbers asked for in another order."""
    numbers = facts(rng, rng.randint(fewest, most))
    lines = [f"The number of the {name} is {number}." for name, number in numbers.items()]
    answers = [
        f"The number of the {name}: {numbers[name]}" for name in rng.sample(list(numbers), len(numbers))
    ]
    return "\n".join([*lines, "", *answers])


def hidden(rng: random.Random, chapters: Sequence[str]) -> str:
    """Prose with numbers in it, asked for at its end."""
    chapter = rng.choice(chapters)
    begin = rng.randrange(max(1, len(chapter) - 500))
    paragraphs = chapter[begin : begin + rng.randint(500, 4000)].split("\n\n")
    numbers = facts(rng, rng.randint(2, 6))
    for name, number in numbers.items():
        paragraphs.insert(rng.randrange(len(paragraphs) + 1), f"The number of the {name} is {number}.")
    said = [f"The number of the {name}: {numbers[name]}" for name in rng.sample(list(numbers), len(numbers))]
    return "\n\n".join(paragraphs) + "\n\n" + "\n".join(said)


def retrieval(tokenizer: Any, rng: random.Random, rows: int, n: int) -> Tokens:
    """[rows, n]: one question after another, from the beginning of one."""
    found = np.empty((rows, n), dtype=np.int64)
    for row in found:
        ids: list[int] = []
        while len(ids) < n:
            for each in tokenizer([asked(rng, *FACTS["more"]) for _ in range(8)])["input_ids"]:
                ids += [*each, tokenizer.eos_token_id]
        row[:] = ids[:n]
    return found


def repeated(rng: random.Random, n_vocabulary: int) -> list[int]:
    """A row of tokens without sense, a few times."""
    n = rng.randint(*REPEATED)
    return [rng.randrange(n_vocabulary) for _ in range(n)] * max(2, 256 // n)


class Stream:
    """Token ids of every kind, one behind another, and the beginnings of the windows of a stage."""

    def __init__(self, tokenizer: Any, n_texts: int | None) -> None:
        rng, chapters = random.Random(0), mix.chapters(held_out=False)
        few = n_texts is not None
        n_made, n_hidden = (20, 20) if few else (MADE, HIDDEN)
        kinds: dict[str, list[list[int]]] = {
            "text": tokenizer(list(itertools.islice(texts(), n_texts)))["input_ids"],
            "hidden": tokenizer([hidden(rng, chapters) for _ in range(n_hidden)])["input_ids"],
            "repeated": [repeated(rng, len(tokenizer)) for _ in range(n_made)],
        }
        for kind, (fewest, most) in FACTS.items():
            kinds[kind] = tokenizer([asked(rng, fewest, most) for _ in range(n_made)])["input_ids"]
        self.ids: Tokens
        self.rng = np.random.default_rng(0)
        self._begins: dict[str, Tokens] = {}
        self._ends: dict[str, int] = {}
        parts, at = [], 0
        for kind, rows in kinds.items():
            lengths = np.array([len(row) + 1 for row in rows])
            begins = at + np.concatenate([[0], lengths.cumsum()[:-1]])
            at += int(lengths.sum())
            parts += [np.array([*row, tokenizer.eos_token_id]) for row in rows]
            # text may begin anywhere, what is asked at the beginning of a question
            self._begins[kind] = np.arange(begins[0], at) if kind == "text" else begins
            self._ends[kind] = at
        self.ids = np.concatenate(parts)
        self.n_text = self._ends["text"]

    def begins(self, stage: int, rows: int) -> Tokens:
        """[rows]: beginnings in ids of a stage's windows."""
        _, window, shares = STAGES[stage]
        kinds = self.rng.choice(list(shares), size=rows, p=list(shares.values()))
        found = np.empty(rows, dtype=np.int64)
        for row, kind in enumerate(kinds):
            begins, last = self._begins[kind], max(self._ends[kind] - window, 0)
            found[row] = min(begins[self.rng.integers(len(begins))], last)
        return found
