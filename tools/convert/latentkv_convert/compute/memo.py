"""Results that are asked for more than once: they are kept up to a number of bytes, and made anew beyond
it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Memo(Generic[Key, Value]):
    def __init__(self, limit: int) -> None:
        self._limit, self._bytes = limit, 0
        self._found: dict[Key, Value] = {}
        self._lock = threading.Lock()

    def get(self, key: Key, make: Callable[[], Value], n_bytes: Callable[[Value], int]) -> Value:
        if key in self._found:
            return self._found[key]
        value = make()
        size = n_bytes(value)
        with self._lock:
            if self._bytes + size <= self._limit:
                self._found[key] = value
                self._bytes += size
        return value
