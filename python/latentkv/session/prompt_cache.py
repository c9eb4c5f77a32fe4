"""Caches of earlier calls, for prompts that begin like one of them: `Llama.set_cache`."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from latentkv import ranges
from latentkv.errors import expected
from latentkv.session import prefix
from latentkv.session.state import LlamaState

Key = TypeVar("Key")


class BaseLlamaCache(ABC):
    """States by their tokens. A look-up finds the one that shares the longest beginning with the key."""

    __module__ = "latentkv"

    def __init__(self, capacity_bytes: int = 2 << 30) -> None:
        self.capacity_bytes = ranges.integer("capacity_bytes", capacity_bytes)

    @property
    @abstractmethod
    def cache_size(self) -> int:
        """Bytes held."""

    @abstractmethod
    def __getitem__(self, key: Sequence[int]) -> LlamaState:
        """Raises KeyError where no state begins like the key."""

    @abstractmethod
    def __contains__(self, key: Sequence[int]) -> bool: ...

    @abstractmethod
    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None:
        """Keeps a state; the ones longest unused go where the capacity is passed."""


class LlamaRAMCache(BaseLlamaCache):
    """In memory."""

    __module__ = "latentkv"

    def __init__(self, capacity_bytes: int = 2 << 30) -> None:
        super().__init__(capacity_bytes)
        self.cache_state: OrderedDict[tuple[int, ...], LlamaState] = OrderedDict()

    @property
    def cache_size(self) -> int:
        return sum(state.llama_state_size for state in self.cache_state.values())

    def __getitem__(self, key: Sequence[int]) -> LlamaState:
        found = _longest(((known, known) for known in self.cache_state), key)
        if found is None:
            raise KeyError("no state begins like the key")
        self.cache_state.move_to_end(found)
        return self.cache_state[found]

    def __contains__(self, key: Sequence[int]) -> bool:
        return _longest(((known, known) for known in self.cache_state), key) is not None

    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None:
        self.cache_state[tuple(key)] = value
        self.cache_state.move_to_end(tuple(key))
        while self.cache_state and self.cache_size > self.capacity_bytes:
            self.cache_state.popitem(last=False)


class LlamaDiskCache(BaseLlamaCache):
    """In a directory, one file of save_state() a state: a directory for every model and its cache formats."""

    __module__ = "latentkv"

    def __init__(self, cache_dir: str = ".cache/llama_cache", capacity_bytes: int = 2 << 30) -> None:
        super().__init__(capacity_bytes)
        self.cache_dir = Path(cache_dir)
        self.cache_dir.mkdir(parents=True, exist_ok=True)

    @property
    def cache_size(self) -> int:
        return sum(path.stat().st_size for path in self._files())

    def __getitem__(self, key: Sequence[int]) -> LlamaState:
        path = self._find(key)
        if path is None:
            raise KeyError("no state begins like the key")
        _use(path)
        return LlamaState.read(path)

    def __contains__(self, key: Sequence[int]) -> bool:
        return self._find(key) is not None

    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None:
        path = self.cache_dir / f"{hashlib.sha256(','.join(map(str, key)).encode()).hexdigest()[:32]}.lkv"
        try:
            value.write(path)
        except OSError as error:  # a full disk: the state is lost, the answer that it is of is not
            wanted = expected("set_cache", f"to write {path}", error.strerror or str(error), "free the disk")
            print(f"warning: {wanted}", file=sys.stderr)
            return
        _use(path)
        for path in sorted(self._files(), key=lambda path: path.stat().st_mtime_ns):
            if self.cache_size <= self.capacity_bytes:
                return
            path.unlink()

    def _files(self) -> list[Path]:
        return list(self.cache_dir.glob("*.lkv"))

    def _find(self, key: Sequence[int]) -> Path | None:
        return _longest(((LlamaState.read_tokens(path), path) for path in self._files()), key)


LlamaCache = LlamaRAMCache


def _use(path: Path) -> None:
    now = time.time_ns()  # a file system's own clock ticks in milliseconds
    os.utime(path, ns=(now, now))


def _longest(states: Iterable[tuple[Sequence[int], Key]], key: Sequence[int]) -> Key | None:
    """The state whose tokens share the most with the beginning of `key`; None where none shares the first."""
    best, most = None, 0
    for tokens, name in states:
        common = prefix.common(list(tokens), list(key))
        if common > most:
            best, most = name, common
    return best
