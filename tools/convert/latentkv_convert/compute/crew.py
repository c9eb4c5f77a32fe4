"""Threads that work on the windows of a text: each takes one window at a time, and torch computes it on that
thread's share of the cores. Operations on a window are too short for all cores to join in every one of them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import TypeVar

MOST = 8  # threads; each holds what torch makes of its window
T = TypeVar("T")
_task = threading.local()


def each(step: Callable[[int], T], n: int, device: str = "cpu") -> Iterator[T]:
    """Yields step(0) … step(n - 1) in order. If `device` is the processor, several are computed at the same
    time. Every step runs in the caller's gradient mode. After one that fails, no other begins."""
    import torch

    cores = torch.get_num_threads()
    n_threads = min(cores, n, MOST) if device == "cpu" else 1
    graded = torch.is_grad_enabled()
    failed: list[int] = []

    def run(at: int) -> T:
        if failed and at > min(failed):  # an earlier one that has not begun may have an error of its own
            raise CancelledError
        _task.at = at
        together = min(n_threads, n - at // n_threads * n_threads)  # fewer in the last round
        torch.set_num_threads(cores // together)
        try:
            with torch.set_grad_enabled(graded):
                return step(at)
        except BaseException:
            failed.append(at)
            raise

    if n_threads < 2:
        yield from map(run, range(n))
        return
    with ThreadPoolExecutor(n_threads, initializer=torch.set_flush_denormal, initargs=(True,)) as threads:
        found = [threads.submit(run, at) for at in range(n)]
        try:
            for future in found:
                yield future.result()
        finally:
            threads.shutdown(cancel_futures=True)
            torch.set_num_threads(cores)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """On one core, whose sums do not depend on how many there are."""
    import torch

    cores = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(cores)


def current() -> int:
    """The number of the step that this thread is running; 0 outside of each()."""
    return getattr(_task, "at", 0)
