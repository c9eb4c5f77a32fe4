"""The lock of a session, which threads that share a Llama take in turn: a session is not thread-safe, and it
decodes without the GIL.

Two things stop a thread that holds the lock: the interpreter, when it shuts down, and a fork, whose child has
one thread. Neither may leave the others waiting."""

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
    """The interpreter ends while a thread that will not run again holds the lock."""


class SessionLock:
    """A reentrant lock: callbacks of a call may make calls. Its holder may use the session. left_behind:
    called in a child of fork() if another thread of the parent held the lock while it changed the session."""

    def __init__(self, left_behind: Callable[[], None]) -> None:
        self._lock = threading.RLock()
        self._left_behind = weakref.WeakMethod(left_behind)
        _locks.add(self)

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


_locks: weakref.WeakSet[SessionLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in list(_locks):
        lock.after_fork()


os.register_at_fork(after_in_child=_after_fork)


class Shared(Protocol):
    """An object with a lock."""

    @property
    def lock(self) -> SessionLock: ...


S = TypeVar("S", bound=Shared)


def locked(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """A method that holds the lock for its whole call."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.lock:
            return method(self, *args, **kwargs)

    return call


def step_by_step(shared: Shared, items: Iterator[T]) -> Generator[T, None, None]:
    """An iterator that holds the lock during each step and not between steps. An abandoned stream therefore
    blocks nobody, and each step may run on another thread."""
    while True:
        with shared.lock:
            try:
                item = next(items)
            except StopIteration:
                return
        yield item
