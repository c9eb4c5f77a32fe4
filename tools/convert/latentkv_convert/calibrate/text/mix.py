"""The text to calibrate on where none is given: prose, code, chat in the model's own template, and numbers to
be found again, in turns.

All of it is on every machine with Python: chapters of its language reference (`pydoc_data`) and modules of
its standard library. Chats ask about functions of these modules and are answered with their documentation and
code; numbers are hidden in the prose and asked for at its end. The same Python and template give the same
text. Every kind has a held-out part of other chapters and modules, to measure on.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

KIND_CHARS = 120_000  # of each kind: all of them are some 120,000 tokens
PIECE = 6000  # characters at most of one kind in a row
HELD_OUT = 0.25  # of the reference's characters
MODULES = {
    False: (
        "argparse bisect calendar configparser csv difflib fractions heapq json.decoder shlex "
        "statistics string textwrap tokenize urllib.parse zipfile contextlib dataclasses html.parser "
        "random tempfile wave"
    ),
    True: "cmd copy glob gzip ipaddress mimetypes netrc platform plistlib pprint queue timeit trace weakref",
}
PLACES = (
    *("depot", "harbour", "archive", "station", "garden", "library"),
    *("workshop", "tower", "mill", "bridge", "market", "school"),
)
SIDES = ("northern", "southern", "eastern", "western", "upper", "lower", "old", "new")

Message = dict[str, str]
Render = Callable[[Sequence[Message]], str]  # a conversation as the model reads it


def text(render: Render, kinds: Sequence[str] = (), *, held_out: bool = False) -> str:
    """Pieces of `kinds` (all of them) in turns.

    Raises:
        KeyError: a kind that is not in KINDS.
    """
    made = [_limited(KINDS[kind](render, held_out)) for kind in kinds or KINDS]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*made, fillvalue=""))
    return "\n\n".join(piece for piece in turns if piece)


def chapters(held_out: bool) -> list[str]:
    """Chapters of the language reference; a hash of its name puts each on one side."""
    from pydoc_data.topics import topics

    left = HELD_OUT * sum(map(len, topics.values()))
    sides: dict[bool, list[str]] = {True: [], False: []}
    for name in sorted(topics, key=lambda name: hashlib.sha256(name.encode()).digest()):
        sides[left > 0].append(topics[name])
        left -= len(topics[name])
    return sides[held_out]


def _limited(texts: Iterator[str]) -> Iterator[str]:
    """Pieces of one length or so, of KIND_CHARS characters together."""
    left, held = KIND_CHARS, ""
    for each in texts:
        held = f"{held}\n\n{each}" if held else each
        if len(held) >= min(left, PIECE // 2):
            yield held[:left]
            left, held = left - len(held), ""
        if left <= 0:
            return


def _prose(render: Render, held_out: bool) -> Iterator[str]:
    yield from _pieces(chapters(held_out))


def _code(render: Render, held_out: bool) -> Iterator[str]:
    yield from _pieces(source for _, source in _modules(held_out))


def _chat(render: Render, held_out: bool) -> Iterator[str]:
    """Two questions about a function: what it is for, and how it is written."""
    for module, source in _modules(held_out):
        for function in ast.walk(ast.parse(source)):
            documented = ast.get_docstring(function) if isinstance(function, ast.FunctionDef) else None
            if documented is None or len(documented) < 80:
                continue
            assert isinstance(function, ast.FunctionDef)
            code = ast.get_source_segment(source, function) or ""
            asked = (
                (f"What does `{function.name}` of Python's module {module} do?", documented),
                ("Show me how it is written.", f"```python\n{code[: PIECE // 2]}\n```"),
            )
            yield render(
                [
                    {"role": role, "content": content}
                    for pair in asked
                    for role, content in zip(("user", "assistant"), pair, strict=True)
                ]
            )


def _numbers(render: Render, held_out: bool) -> Iterator[str]:
    """Prose with five numbers in it, which are asked for in another order."""
    rng = random.Random(int(held_out))
    for at, piece in enumerate(_pieces(chapters(held_out), PIECE - 1000)):
        paragraphs = piece.split("\n\n")
        names = rng.sample([f"{side} {place}" for side in SIDES for place in PLACES], 5)
        numbers = {name: str(rng.randrange(10_000, 10_000_000)) for name in names}
        for name, number in numbers.items():
            paragraphs.insert(rng.randrange(len(paragraphs)), f"The number of the {name} is {number}.")
        read, asked = "\n\n".join(paragraphs), rng.sample(names, len(names))
        if at % 2:
            said = [f"The number of the {name}: {numbers[name]}" for name in asked]
            yield "\n".join([read, *said])
        else:
            question = f"{read}\n\nWhat are the numbers of {', '.join(f'the {name}' for name in asked)}?"
            answer = "\n".join(f"The {name}: {numbers[name]}" for name in asked)
            yield render([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])


def _modules(held_out: bool) -> Iterator[tuple[str, str]]:
    """Name and source of every module that this Python has as a file."""
    for name in MODULES[held_out].split():
        found = importlib.util.find_spec(name)
        if found is not None and found.origin and found.origin.endswith(".py"):
            yield name, Path(found.origin).read_text(encoding="utf-8")


def _pieces(texts: Sequence[str] | Iterator[str], size: int = PIECE) -> Iterator[str]:
    """Cut at empty lines where there are any."""
    for each in texts:
        while len(each) > size:
            cut = each.rfind("\n\n", size // 2, size)
            cut = cut if cut > 0 else size
            yield each[:cut].strip("\n")
            each = each[cut:]
        if each.strip():
            yield each.strip("\n")


KINDS: dict[str, Callable[[Render, bool], Iterator[str]]] = {
    "prose": _prose,
    "code": _code,
    "chat": _chat,
    "numbers": _numbers,
}
