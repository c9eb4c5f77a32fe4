"""Threads that share a Llama take turns: its session is not thread-safe, and decodes without the GIL.

Two things end a turn without its thread: the interpreter, when it shuts down, and a fork, whose child has one
thread. Neither may leave the others waiting."""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class ShuttingDown(RuntimeError):
    """The interpreter ends while a thread that will not run again has its turn."""


class Turn:
    """A reentrant lock: callbacks of a call may call on. Whoever holds it may use the session.

    left_behind: called in a child of fork() where another thread of the parent had the turn, and was in the
    middle of changing the session."""

    def __init__(self, left_behind: Callable[[], None]) -> None:
        self._lock = threading.RLock()
        self._left_behind = weakref.WeakMethod(left_behind)
        _turns.add(self)

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=not sys.is_finalizing()):
            raise ShuttingDown("the interpreter shuts down while another thread generates")

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def after_fork(self) -> None:
        if self._lock.acquire(blocking=False):
            self._lock.release()
            return
        self._lock = threading.RLock()
        if (left_behind := self._left_behind()) is not None:
            left_behind()


_turns: weakref.WeakSet[Turn] = weakref.WeakSet()


def _after_fork() -> None:
    for turn in list(_turns):
        turn.after_fork()


os.register_at_fork(after_in_child=_after_fork)


class Shared(Protocol):
    """What has turns."""

    @property
    def lock(self) -> Turn: ...


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
