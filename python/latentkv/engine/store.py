"""Sequences that lost their place in the cache, kept in compressed rows: in memory, and behind that in files.

A file is complete or absent (LlamaState.write), is checked when it is read, and lies in a folder named after
the weights that it belongs to; its own name says its tokens and row formats. Nothing else is needed to find
it again after a restart. The folder is one process's at a time: two would take each other's files for too
much, and remove them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from latentkv import durable
from latentkv.errors import LatentKVError, expected
from latentkv.session.state import LlamaState


@dataclass
class Entry:
    """Tokens of a sequence and its rows, or the file that they are in."""

    tokens: list[int]
    n_bytes: int
    rows: bytes | None
    path: Path | None
    is_own: bool = True  # in the row formats of this store
    is_fit: bool = True  # to be coded in them


class PrefixStore:
    """ram_bytes, disk_bytes: how much may be kept; 0 keeps nothing. identity: of weights, and of which tokens
    have rows where. formats: of rows. Those of others are found too: whoever takes them codes them anew."""

    def __init__(
        self,
        identity: str,
        ram_bytes: int,
        folder: str | Path | None = None,
        disk_bytes: int = 0,
        formats: str = "",
    ) -> None:
        self._formats = _digest(formats.encode())
        self._ram, self._disk = ram_bytes, disk_bytes
        self._entries: OrderedDict[str, Entry] = OrderedDict()  # the longest unused first
        self._folder: Path | None = None
        self._unlock: Callable[[], object] | None = None
        if folder is not None:
            self._folder = self._opened(Path(folder) / f"latentkv-{_digest(identity.encode())}")

    @property
    def ram_used(self) -> int:
        return sum(entry.n_bytes for entry in self._entries.values() if entry.rows is not None)

    @property
    def disk_used(self) -> int:
        return sum(entry.n_bytes for entry in self._entries.values() if entry.path is not None)

    def __len__(self) -> int:
        return len(self._entries)

    def best(self, worth: Callable[[Sequence[int]], int]) -> tuple[str, int]:
        """The key of the sequence that is worth most, and how much; ("", 0) if none is."""
        fit = ((key, entry) for key, entry in self._entries.items() if entry.is_fit)
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

    def put(self, tokens: Sequence[int], rows: Callable[[], bytes]) -> None:
        """Keeps a sequence, whose rows are asked for if they are needed. One that begins it is not needed any
        more; nor is this, where it begins another."""
        if not self._ram and not self._disk:
            return
        for key, entry in list(self._entries.items()):
            if not entry.is_own:
                continue
            if entry.tokens[: len(tokens)] == list(tokens):
                self._entries.move_to_end(key)
                return
            if list(tokens[: len(entry.tokens)]) == entry.tokens:
                self._drop(key)
        found = rows()
        self._entries[f"{_key(tokens)}-{self._formats}"] = Entry(list(tokens), len(found), found, None)
        self._fit()

    def take(self, key: str) -> bytes | None:
        """The rows; None where their file is gone or damaged, and is forgotten."""
        entry = self._entries[key]
        self._entries.move_to_end(key)
        if entry.rows is not None:
            return entry.rows
        assert entry.path is not None
        try:
            return LlamaState.read(entry.path).cache
        except (OSError, LatentKVError):
            self._drop(key)
            return None

    def _fit(self) -> None:
        """What memory does not hold goes to files, what they do not hold is forgotten."""
        for key, entry in list(self._entries.items()):
            if self.ram_used <= self._ram:
                break
            if entry.rows is not None and not self._written(key, entry):
                self._drop(key)
        for key, entry in list(self._entries.items()):
            if self.disk_used <= self._disk:
                break
            if entry.path is not None:
                self._drop(key)

    def _written(self, key: str, entry: Entry) -> bool:
        """Moves an entry to its file, if there is a folder and it takes it."""
        if self._folder is None or entry.n_bytes > self._disk or entry.rows is None:
            return False
        path = self._folder / f"{key}.state"
        try:
            # what a power cut damages is found by its checksum, and a step waits for no disk
            LlamaState(entry.tokens, entry.rows, None, 0).write(path, flushed=False)
        except OSError as error:  # a full disk: the rows are lost, answers are not
            wanted = expected("--cache-dir", f"to write {path}", error.strerror or error, "free the disk")
            print(f"warning: {wanted}", file=sys.stderr, flush=True)
            return False
        entry.rows, entry.path = None, path
        return True

    def _drop(self, key: str) -> None:
        entry = self._entries.pop(key)
        if entry.path is not None:
            with contextlib.suppress(OSError):
                entry.path.unlink(missing_ok=True)

    def _opened(self, folder: Path) -> Path:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise expected("--cache-dir", "a folder to write to", f"{folder}: {error.strerror}") from None
        self._unlock = weakref.finalize(self, os.close, _locked(folder))
        durable.sweep(folder)
        for path in sorted(folder.glob("*.state"), key=lambda each: each.stat().st_mtime):
            try:
                tokens = LlamaState.read_tokens(path)
            except (OSError, LatentKVError):
                path.unlink(missing_ok=True)
                continue
            is_own = path.stem.endswith(f"-{self._formats}")
            self._entries[path.stem] = Entry(tokens, path.stat().st_size, None, path, is_own)
        self._fit()
        return folder

    def close(self) -> None:
        """Writes what is in memory, as far as files take it, and leaves them to others."""
        for key, entry in list(self._entries.items()):
            if entry.rows is not None:
                self._written(key, entry)
        self._fit()
        self._entries.clear()
        self._ram = self._disk = 0
        if self._unlock is not None:
            self._unlock()


def _locked(folder: Path) -> int:
    """A descriptor that is open as long as this process has the folder. The system gives it back, however the
    process ends."""
    try:
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.truncate(lock, 0)
            with contextlib.suppress(OSError):  # of a full disk, whose files are read all the same
                os.write(lock, str(os.getpid()).encode())
        except OSError:
            os.close(lock)
            raise
    except BlockingIOError:
        got = f"{folder}, in use by process {(folder / 'lock').read_text() or 'unknown'}"
        hint = "choose another, or stop that one"
        raise expected("--cache-dir", "a folder without another server of this model", got, hint) from None
    except OSError as error:
        raise expected("--cache-dir", "a folder to lock", f"{folder}: {error.strerror}") from None
    return lock


def _key(tokens: Sequence[int]) -> str:
    return _digest(b"".join(token.to_bytes(4, "little", signed=True) for token in tokens), 32)


def _digest(data: bytes, length: int = 16) -> str:
    return hashlib.sha256(data).hexdigest()[:length]
