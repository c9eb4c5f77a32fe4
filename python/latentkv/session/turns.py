"""Threads that share a Llama take turns: its session is not thread-safe, and decodes without the GIL."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Shared(Protocol):
    """`lock` is reentrant: callbacks of a call may call on. Whoever holds it may use the session."""

    lock: threading.RLock  # type: ignore[valid-type]


S = TypeVar("S", bound=Shared)


def in_turn(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """A method whose whole call is one turn."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.lock:
            return method(self, *args, **kwargs)

    return call


def step_by_step(shared: Shared, items: Iterator[T]) -> Generator[T, None, None]:
    """An iterator each step of which is a turn. Between steps nothing is held: an abandoned stream blocks
    nobody, and each step may come from another thread."""
    while True:
        with shared.lock:
            try:
                item = next(items)
            except StopIteration:
                return
        yield item
