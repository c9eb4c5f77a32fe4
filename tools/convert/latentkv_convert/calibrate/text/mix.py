"""The text to calibrate on where none is given: prose, code, chat in the model's own template, and numbers to
be found again, in turns.

All of it is on every machine with Python: chapters of its language reference (`pydoc_data`) and modules of
its standard library. Chats ask about functions of these modules and are answered with their documentation and
code; numbers are hidden in the prose and asked for at its end. The same Python and template give the same
text. Every kind has three parts of different chapters and modules: to fit to, to check a plan on, and to
measure on what nothing has seen.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

FITTED, CHECKED, HELD_OUT = PARTS = ("fitted", "checked", "held out")
# Characters of each kind: all of them are some 120,000 tokens, and a quarter of that to check on.
KIND_CHARS = {FITTED: 120_000, CHECKED: 30_000, HELD_OUT: 120_000}
PIECE = 6000  # characters at most of one kind in a row
HELD_OUT_SHARE, CHECKED_SHARE = 0.25, 0.15  # of the reference's characters
MODULES = {
    FITTED: (
        "argparse bisect calendar configparser csv difflib heapq json.decoder shlex statistics string "
        "tokenize urllib.parse zipfile contextlib dataclasses random"
    ),
    CHECKED: "fractions html.parser tempfile textwrap wave",
    HELD_OUT: (
        "cmd copy glob gzip ipaddress mimetypes netrc platform plistlib pprint queue timeit trace weakref"
    ),
}
PLACES = (
    *("depot", "harbour", "archive", "station", "garden", "library"),
    *("workshop", "tower", "mill", "bridge", "market", "school"),
)
SIDES = ("northern", "southern", "eastern", "western", "upper", "lower", "old", "new")

PROSE_STEP, CODE_STEP = 2, 5  # of the pieces of a part, one in so many comes first

T = TypeVar("T")
Message = dict[str, str]
Render = Callable[[Sequence[Message]], str]  # a conversation as the model reads it


def text(render: Render, kinds: Sequence[str] = (), part: str = FITTED) -> str:
    """Pieces of `kinds` (all of them) in turns. part: one of PARTS.

    Raises:
        KeyError: a kind that is not in KINDS.
    """
    made = [_limited(KINDS[kind](render, part), KIND_CHARS[part]) for kind in kinds or KINDS]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*made, fillvalue=""))
    return "\n\n".join(piece for piece in turns if piece)


def chapters(held_out: bool) -> list[str]:
    """Chapters of the language reference; a hash of its name puts each on one side."""
    from pydoc_data.topics import topics

    left = HELD_OUT_SHARE * sum(map(len, topics.values()))
    sides: dict[bool, list[str]] = {True: [], False: []}
    for name in sorted(topics, key=lambda name: hashlib.sha256(name.encode()).digest()):
        sides[left > 0].append(topics[name])
        left -= len(topics[name])
    return sides[held_out]


def _chapters(part: str) -> list[str]:
    """Those of one part. The last of the chapters that are not held out are checked on."""
    found = chapters(held_out=part == HELD_OUT)
    if part == HELD_OUT:
        return found
    left, n = CHECKED_SHARE / (1 - HELD_OUT_SHARE) * sum(map(len, found)), 0
    while left > 0:
        n += 1
        left -= len(found[-n])
    return found[-n:] if part == CHECKED else found[:-n]


def _limited(texts: Iterator[str], size: int) -> Iterator[str]:
    """Pieces of one length or so, of `size` characters together."""
    left, held = size, ""
    for each in texts:
        held = f"{held}\n\n{each}" if held else each
        if len(held) >= min(left, PIECE // 2):
            yield held[:left]
            left, held = left - len(held), ""
        if left <= 0:
            return


def _spread(items: Sequence[T], n: int, first: int = 0) -> Iterator[T]:
    """Every n-th one, then those beside them: a part of them is a part of all chapters or modules."""
    for begin in range(n):
        yield from items[(first + begin) % n :: n]


def _prose(render: Render, part: str) -> Iterator[str]:
    yield from _spread(_prose_pieces(part), PROSE_STEP)


def _code(render: Render, part: str) -> Iterator[str]:
    yield from _spread(list(_pieces(source for _, source in _modules(part))), CODE_STEP)


def _chat(render: Render, part: str) -> Iterator[str]:
    """Two questions about a function: what it is for, and how it is written."""
    functions = [
        (module, source, function)
        for module, source in _modules(part)
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef) and len(ast.get_docstring(function) or "") >= 80
    ]
    for module, source, function in _spread(functions, CODE_STEP):
        code = ast.get_source_segment(source, function) or ""
        asked = (
            (f"What does `{function.name}` of Python's module {module} do?", ast.get_docstring(function)),
            ("Show me how it is written.", f"```python\n{code[: PIECE // 2]}\n```"),
        )
        yield render(
            [
                {"role": role, "content": content or ""}
                for pair in asked
                for role, content in zip(("user", "assistant"), pair, strict=True)
            ]
        )


def _numbers(render: Render, part: str) -> Iterator[str]:
    """Prose with five numbers in it, which are asked for in another order."""
    rng = random.Random(PARTS.index(part))
    for at, piece in enumerate(_spread(_prose_pieces(part), PROSE_STEP, 1)):
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


def _prose_pieces(part: str) -> list[str]:
    return list(_pieces(_chapters(part), PIECE - 1000))


def _modules(part: str) -> Iterator[tuple[str, str]]:
    """Name and source of every module that this Python has as a file."""
    for name in MODULES[part].split():
        found = importlib.util.find_spec(name)
        if found is not None and found.origin and found.origin.endswith(".py"):
            yield name, Path(found.origin).read_text(encoding="utf-8")


def _pieces(texts: Iterable[str], size: int = PIECE) -> Iterator[str]:
    """Cut at empty lines where there are any."""
    for each in texts:
        while len(each) > size:
            cut = each.rfind("\n\n", size // 2, size)
            cut = cut if cut > 0 else size
            yield each[:cut].strip("\n")
            each = each[cut:]
        if each.strip():
            yield each.strip("\n")


KINDS: dict[str, Callable[[Render, str], Iterator[str]]] = {
    "prose": _prose,
    "code": _code,
    "chat": _chat,
    "numbers": _numbers,
}
