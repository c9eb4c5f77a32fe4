"""Which tokens of the calibration text the model sees: windows spread evenly over it, each starting with BOS
if the tokenizer adds one."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from latentkv.console.reading import read_text as read_file

from ..errors import ConvertError
from ..source.source import Source

MIN_TOKENS = 256
SPARE = 8
_MAX_CHARS = 16_000_000  # longer texts are read in evenly spaced pieces of this total


@dataclass(frozen=True)
class Encoded:
    ids: NDArray[np.int64]  # the text without special tokens
    bos: NDArray[np.int64]  # what starts a window: [] or [bos]


@dataclass(frozen=True)
class Sample:
    tokens: NDArray[np.int64]  # [windows, window]
    # [up to SPARE, window or longer] each of the rest of the text, or of another one. Nothing is fitted to
    # the spare windows; with deep ones the choice that statistics lead to is corrected.
    spare: NDArray[np.int64]
    deep: NDArray[np.int64]

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(repr(self.tokens.shape).encode() + self.tokens.tobytes()).hexdigest()

    @classmethod
    def draw(
        cls,
        text: Encoded,
        n_tokens: int,
        window: int,
        seed: int,
        deep: int = 0,
        other: Encoded | None = None,
    ) -> Sample:
        """About n_tokens tokens (all of the text if it is shorter) in equal windows.

        One window is drawn at random from each of equally long stretches of the text. deep: tokens of spare
        and deep windows where the rest of the text has neighbours enough, at most twice `window`. other:
        another text, for the spare windows.
        """
        ids, bos = text.ids, text.bos
        body = min(window, len(ids) + len(bos)) - len(bos)
        available = len(ids) // body
        wanted = max(1, min(available, n_tokens // (body + len(bos))))
        rng = np.random.default_rng(seed)
        edges = np.linspace(0, available, wanted + 1).astype(np.int64)
        picks = [int(rng.integers(low, high)) for low, high in itertools.pairwise(edges)]
        rest = np.setdiff1d(np.arange(available), picks)

        def windows(chosen: Sequence[int], size: int = body) -> NDArray[np.int64]:
            rows = [np.concatenate([bos, ids[pick * body :][:size]]) for pick in chosen]
            return np.array(rows, dtype=np.int64).reshape(len(rows), len(bos) + size)

        size = min(deep - len(bos), 2 * body)
        pairs = neighbours(rest.tolist())
        if size <= body or len(pairs) < 4:
            none = windows([])
            if other is None:
                return cls(windows(picks), windows(spread(rest.tolist())), none)
            return cls(windows(picks), cut(other, len(bos) + max(size, body)), none)
        if other is None:
            return cls(windows(picks), windows(spread(pairs[::2]), size), windows(spread(pairs[1::2]), size))
        return cls(windows(picks), cut(other, len(bos) + size), windows(spread(pairs), size))


def neighbours(places: Sequence[int]) -> list[int]:
    """The first ones of pairs i, i + 1 of ascending places, none of them in two pairs."""
    found: list[int] = []
    known = set(places)
    for place in places:
        if place + 1 in known and (not found or place > found[-1] + 1):
            found.append(place)
    return found


def spread(places: Sequence[int]) -> list[int]:
    """Up to SPARE of them, evenly spaced."""
    return [places[at] for at in np.linspace(0, len(places) - 1, min(SPARE, len(places))).astype(np.int64)]


def cut(text: Encoded, size: int) -> NDArray[np.int64]:
    """[n, size] all of the text, as windows of a sample are cut."""
    body = size - len(text.bos)
    rows = [np.concatenate([text.bos, text.ids[at * body :][:body]]) for at in range(len(text.ids) // body)]
    return np.array(rows, dtype=np.int64).reshape(len(rows), size)


def read_text(path: Path, option: str = "--calib") -> str:
    try:
        text = read_file(path, option)
    except OSError as error:
        raise ConvertError(option, f"a readable text file at {path}", error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise ConvertError(
            option, "UTF-8 text", f"byte 0x{error.object[error.start]:02x} at {error.start}"
        ) from None
    if not text.strip():
        raise ConvertError(option, f"a text of at least {MIN_TOKENS} tokens", f"an empty file {path.name}")
    return text


def read_texts(paths: Sequence[Path], option: str = "--calib") -> str:
    """Several texts as one, in their order."""
    return "\n\n".join(read_text(path, option) for path in paths)


def _thin(text: str) -> str:
    if len(text) <= _MAX_CHARS:
        return text
    pieces = 64
    size = _MAX_CHARS // pieces
    starts = np.linspace(0, len(text) - size, pieces).astype(np.int64)
    return "".join(text[start : start + size] for start in starts)


def encode(text: str, source: Source, option: str = "--calib") -> Encoded:
    """The text through the model's own tokenizer.

    Raises:
        ConvertError: fewer than MIN_TOKENS tokens, or ids the model does not have.
    """
    ids = np.array(source.encode(_thin(text)), dtype=np.int64)
    if len(ids) < MIN_TOKENS:
        raise ConvertError(option, f"a text of at least {MIN_TOKENS} tokens", f"{len(ids)} tokens")
    if ids.max() >= source.spec.n_vocab:
        raise ConvertError("tokenizer", f"ids below vocab_size {source.spec.n_vocab}", str(int(ids.max())))
    bos = source.bos()
    return Encoded(ids, np.array([] if bos is None else [bos], dtype=np.int64))
