"""Files are made, and what needs them is measured, by a few workers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from queue import SimpleQueue
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made", bound=Hashable)
Result = TypeVar("Result")


def run_all(
    items: Sequence[Item],
    needs: Callable[[Item], Made],
    make: Callable[[Made], str],
    measure: Callable[[Item], Result],
    n_workers: int,
) -> Iterator[tuple[Item, Result | str]]:
    """(item, what measure returned, or why what it needs could not be made), as they finish.

    make returns why it failed, or "". Every other worker prefers to make, from the second on; the others
    measure what is ready, in order.
    """
    state = _State(list(dict.fromkeys(map(needs, items))), deque(items))
    results: SimpleQueue[tuple[Item, Result | str] | BaseException] = SimpleQueue()

    def work(makes_first: bool) -> None:
        try:
            while (task := state.next(makes_first, needs)) is not None:
                kind, value = task
                if kind == "make":
                    state.made(value, make(value))
                else:
                    why = state.why(needs(value))
                    results.put((value, why or measure(value)))
        except BaseException as error:
            state.stop()
            results.put(error)

    threads = [threading.Thread(target=work, args=(i % 2 == 1,), daemon=True) for i in range(n_workers)]
    for thread in threads:
        thread.start()
    for _ in items:
        result = results.get()
        if isinstance(result, BaseException):
            raise result
        yield result
    for thread in threads:
        thread.join()


class _State:
    def __init__(self, to_make: list, items: deque) -> None:
        self._to_make, self._items = deque(to_make), items
        self._whys: dict[Hashable, str] = {}
        self._changed = threading.Condition()

    def next(self, makes_first: bool, needs: Callable) -> tuple[str, object] | None:
        """A task, waited for; None: there will be no more."""
        with self._changed:
            while self._items:
                ready = next((item for item in self._items if needs(item) in self._whys), None)
                if self._to_make and (makes_first or ready is None):
                    return "make", self._to_make.popleft()
                if ready is not None:
                    self._items.remove(ready)
                    return "measure", ready
                self._changed.wait()
            return None

    def made(self, value: Hashable, why: str) -> None:
        with self._changed:
            self._whys[value] = why
            self._changed.notify_all()

    def why(self, value: Hashable) -> str:
        return self._whys[value]

    def stop(self) -> None:
        with self._changed:
            self._items.clear()
            self._changed.notify_all()
