"""Results that are asked for more than once: kept up to a number of bytes, made anew beyond it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Kept(Generic[Key, Value]):
    def __init__(self, limit: int) -> None:
        self._limit, self._bytes = limit, 0
        self._found: dict[Key, Value] = {}

    def get(self, key: Key, make: Callable[[], Value], n_bytes: Callable[[Value], int]) -> Value:
        if key in self._found:
            return self._found[key]
        value = make()
        size = n_bytes(value)
        if self._bytes + size <= self._limit:
            self._found[key] = value
            self._bytes += size
        return value

    def clear(self) -> None:
        self._found.clear()
        self._bytes = 0
