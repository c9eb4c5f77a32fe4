"""Pieces of kept sequences: rows of some of their tokens, in memory or in a file. What several sequences
begin with is one piece that all of them hold."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from latentkv.errors import LatentKVError, expected
from latentkv.session.state import LlamaState

CHUNK = 256  # tokens of a piece that sequences share
SHARED, END = ".rows", ".state"  # files of such a piece, and of the end of a sequence


@dataclass(eq=False)
class Piece:
    """`tokens`: of the whole sequence, where this is its end; `shared`: names of the pieces before it;
    `salt`: of who may go on from it."""

    name: str
    n_bytes: int
    rows: bytes | None
    path: Path | None = None
    tokens: Sequence[int] = ()
    shared: Sequence[str] = ()
    salt: str = ""
    holders: int = 0

    def read(self) -> bytes | None:
        """The rows; None where their file is gone or damaged."""
        if self.rows is not None:
            return self.rows
        assert self.path is not None
        try:
            return LlamaState.read(self.path).cache
        except (OSError, LatentKVError):
            return None

    def write(self, folder: Path) -> bool:
        """To a file, in place of memory. False, with a warning: the disk does not take it."""
        assert self.rows is not None
        path = folder / f"{self.name}{END if self.tokens else SHARED}"
        told = {"shared": list(self.shared), "salt": self.salt}
        state = LlamaState(list(self.tokens), self.rows, None, 0, told)
        try:
            # what a power cut damages is found by its checksum, and a step waits for no disk
            state.write(path, flushed=False)
            self.n_bytes = path.stat().st_size
        except OSError as error:  # a full disk: the rows are lost, answers are not
            wanted = expected("--cache-dir", f"to write {path}", error.strerror or error, "free the disk")
            print(f"warning: {wanted}", file=sys.stderr, flush=True)
            return False
        self.rows, self.path = None, path
        return True


class Pieces:
    """Pieces by name, those unused for longest first. A piece that nobody holds is dropped with its file."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Piece] = OrderedDict()
        self.ram_used = self.disk_used = 0

    def __iter__(self) -> Iterator[Piece]:
        return iter(list(self._known.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def get(self, name: str) -> Piece:
        return self._known[name]

    def hold(self, piece: Piece) -> Piece:
        """For one more sequence; a piece of that name that is there already is the one."""
        known = self._known.setdefault(piece.name, piece)
        if known is piece and not piece.holders:
            self._count(piece, 1)
        known.holders += 1
        self._known.move_to_end(piece.name)
        return known

    def use(self, piece: Piece) -> None:
        self._known.move_to_end(piece.name)

    def let_go(self, piece: Piece) -> None:
        piece.holders -= 1
        if piece.holders:
            return
        del self._known[piece.name]
        self._count(piece, -1)
        if piece.path is not None:
            remove(piece.path)

    def write(self, piece: Piece, folder: Path) -> bool:
        self._count(piece, -1)
        is_written = piece.write(folder)
        self._count(piece, 1)
        return is_written

    def _count(self, piece: Piece, sign: int) -> None:
        if piece.path is None:
            self.ram_used += sign * piece.n_bytes
        else:
            self.disk_used += sign * piece.n_bytes


def remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        wanted = expected("--cache-dir", f"to remove {path}", error.strerror or error)
        print(f"warning: {wanted}", file=sys.stderr, flush=True)


def chunk_ends(settled: int, offset: int) -> list[int]:
    """Where pieces end that sequences with `settled` tokens in common have in common. `offset`: first tokens
    that belong to the first piece beside its CHUNK, so that no block of rows lies in two."""
    return list(range(offset + CHUNK, settled + 1, CHUNK))


def chunk_names(tokens: Sequence[int], ends: Sequence[int], suffix: str, salt: str = "") -> list[str]:
    """A name says all tokens up to the end of its piece, and whose they are."""
    names, digest, first = [], hashlib.sha256(salt.encode()), 0
    for end in ends:
        digest.update(array("i", tokens[first:end]).tobytes())
        names.append(f"{digest.hexdigest()[:32]}-{suffix}")
        first = end
    return names
