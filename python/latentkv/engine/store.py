"""Sequences that lost their place in the cache, kept in compressed rows: in memory, and behind that in files.

A sequence is kept in pieces. Two conversations with one system prompt:

    conversation 1   | shared 0-255 | shared 256-511 | end: 512-801 |
    conversation 2   | shared 0-255 | shared 256-511 | shared 512-767 | end: 768-1200 |

The shared pieces are there once. Rows that a sequence alone has are its end: tokens of the exact window,
those of layers with a sliding window, and all of it under eviction.

A file is complete or absent, is checked when it is read, and lies in a folder named after the weights that it
belongs to; its own name says its tokens, salt and row formats. Nothing else is needed to find it again after
a restart.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from latentkv.engine.folder import opened
from latentkv.engine.pieces import END, SHARED, Piece, Pieces, chunk_ends, chunk_names, remove
from latentkv.errors import LatentKVError
from latentkv.session.state import LlamaState

# Rows of a sequence in parts: between each two of these tokens, and from the last one on.
Rows = Callable[[Sequence[int]], Sequence[bytes]]


@dataclass
class Entry:
    """Tokens of a sequence and its pieces, the end last."""

    tokens: list[int]
    pieces: list[Piece]
    salt: str = ""
    is_own: bool = True  # in the row formats of this store
    is_fit: bool = True  # to be coded in them


class PrefixStore:
    """ram_bytes, disk_bytes: how much may be kept; 0 keeps nothing. identity: of weights, and of which tokens
    have rows where. formats: of rows. Those of others are found too: whoever takes them codes them anew.
    sink: first tokens with a region of their own."""

    def __init__(
        self,
        identity: str,
        ram_bytes: int,
        folder: str | Path | None = None,
        disk_bytes: int = 0,
        formats: str = "",
        sink: int = 0,
    ) -> None:
        self._formats = _digest(formats.encode())
        self._ram, self._disk, self._sink = ram_bytes, 0 if folder is None else disk_bytes, sink
        self._entries: OrderedDict[str, Entry] = OrderedDict()  # the longest unused first
        self._pieces = Pieces()
        self.folder: Path | None = None  # of this model
        self._unlock: Callable[[], object] | None = None
        if folder is not None:
            self.folder = Path(folder) / f"latentkv-{_digest(identity.encode())}"
            self._unlock = weakref.finalize(self, os.close, opened(self.folder))
            self._find(self.folder)

    @property
    def ram_used(self) -> int:
        return self._pieces.ram_used

    @property
    def disk_used(self) -> int:
        return self._pieces.disk_used

    @property
    def unshared(self) -> int:
        """Bytes that the sequences would take if none shared a piece with another."""
        return sum(piece.n_bytes * piece.holders for piece in self._pieces)

    def __len__(self) -> int:
        return len(self._entries)

    def best(self, worth: Callable[[Sequence[int]], int], salt: str = "") -> tuple[str, int]:
        """The key of the sequence with this salt that is worth most, and how much; ("", 0) if none is."""
        fit = ((key, each) for key, each in self._entries.items() if each.is_fit and each.salt == salt)
        found = [(worth(entry.tokens), entry.is_own, key) for key, entry in fit]
        most, _, key = max(found, default=(0, True, ""))
        return (key, most) if most > 0 else ("", 0)

    def is_own(self, key: str) -> bool:
        """Whether its rows have this store's formats."""
        return self._entries[key].is_own

    def pass_over(self, key: str) -> None:
        """From now on; it stays for those whose formats it has."""
        self._entries[key].is_fit = False

    def tokens(self, key: str) -> list[int]:
        return self._entries[key].tokens

    def put(self, tokens: Sequence[int], rows: Rows, settled: int = 0, salt: str = "") -> None:
        """Keeps a sequence, whose rows are asked for as far as they are needed. `settled`: of its tokens the
        first so many have rows that any sequence that begins with them has. A sequence that begins this one
        is not needed any more; nor is this, where it begins another."""
        if not self._ram and not self._disk:
            return
        begun = []
        for key, entry in self._entries.items():
            if not entry.is_own or entry.salt != salt:
                continue
            if entry.tokens[: len(tokens)] == list(tokens):
                self._use(key)
                return
            if list(tokens[: len(entry.tokens)]) == entry.tokens:
                begun.append(key)
        ends = chunk_ends(min(settled, len(tokens) - 1), self._sink)
        names = chunk_names(tokens, ends, self._formats, salt)
        n_there = next((i for i, name in enumerate(names) if name not in self._pieces), len(names))
        parts = rows([0, *ends][n_there:])
        pieces = [self._pieces.hold(self._pieces.get(name)) for name in names[:n_there]]
        for name, part in zip(names[n_there:], parts[:-1], strict=True):
            pieces.append(self._pieces.hold(Piece(name, len(part), part)))
        key = f"{_key(tokens, salt)}-{self._formats}"
        kept = list(tokens)
        end = Piece(key, len(parts[-1]), parts[-1], tokens=kept, shared=names, salt=salt)
        self._entries[key] = Entry(kept, [*pieces, self._pieces.hold(end)], salt)
        for each in begun:
            self._drop(each)
        self._fit()

    def take(self, key: str) -> list[bytes] | None:
        """The rows, piece by piece; None where a file is gone or damaged, and is forgotten."""
        self._use(key)
        parts = []
        for piece in self._entries[key].pieces:
            rows = piece.read()
            if rows is None:
                self._drop_holders(piece)
                return None
            parts.append(rows)
        return parts

    def _use(self, key: str) -> None:
        self._entries.move_to_end(key)
        for piece in self._entries[key].pieces:
            self._pieces.use(piece)

    def _fit(self) -> None:
        """What memory does not hold goes to files, what they do not hold is forgotten."""
        for piece in self._pieces:
            if self.ram_used <= self._ram:
                break
            if piece.rows is None or not piece.holders or self._written(piece):
                continue
            if self.folder is None:
                self._drop_oldest(lambda held: held.rows is not None)
            else:  # whose disk is full
                self._drop_holders(piece)
        self._fit_disk()

    def _fit_disk(self) -> None:
        while self.disk_used > self._disk:
            self._drop_oldest(lambda held: held.path is not None)

    def _written(self, piece: Piece) -> bool:
        """Moves a piece to its file, if there is a folder and it takes it."""
        if self.folder is None or piece.n_bytes > self._disk:
            return False
        return self._pieces.write(piece, self.folder)

    def _drop_oldest(self, has: Callable[[Piece], bool]) -> None:
        """The longest unused sequence with such a piece."""
        self._drop(next(key for key, entry in self._entries.items() if any(map(has, entry.pieces))))

    def _drop_holders(self, piece: Piece) -> None:
        for key, entry in list(self._entries.items()):
            if piece in entry.pieces:
                self._drop(key)

    def _drop(self, key: str) -> None:
        for piece in self._entries.pop(key).pieces:
            self._pieces.let_go(piece)

    def _find(self, folder: Path) -> None:
        """What is in the folder; files that belong to no whole sequence are removed."""
        shared = {path.stem: path for path in folder.glob(f"*{SHARED}")}
        for path in sorted(folder.glob(f"*{END}"), key=lambda each: each.stat().st_mtime):
            try:
                head = LlamaState.read_head(path)
                tokens, names = head["input_ids"], head["extra"].get("shared", [])
                salt = head["extra"].get("salt", "")
                paths = [shared[name] for name in names]
            except (OSError, LatentKVError, KeyError, TypeError):
                remove(path)
                continue
            found = [Piece(each.stem, each.stat().st_size, None, each) for each in paths]
            end = Piece(path.stem, path.stat().st_size, None, path, tokens, names, salt)
            pieces = [self._pieces.hold(piece) for piece in (*found, end)]
            self._entries[path.stem] = Entry(tokens, pieces, salt, path.stem.endswith(f"-{self._formats}"))
        for name, path in shared.items():
            if name not in self._pieces:
                remove(path)
        self._fit()

    def close(self) -> None:
        """Writes what is in memory, as far as files take it, and leaves them to others."""
        for piece in self._pieces:
            if piece.rows is not None:
                self._written(piece)
        self._fit_disk()
        self._entries.clear()
        self._pieces = Pieces()
        self._ram = self._disk = 0
        if self._unlock is not None:
            self._unlock()


def _key(tokens: Sequence[int], salt: str) -> str:
    return _digest(salt.encode() + array("i", tokens).tobytes(), 32)


def _digest(data: bytes, length: int = 16) -> str:
    return hashlib.sha256(data).hexdigest()[:length]
