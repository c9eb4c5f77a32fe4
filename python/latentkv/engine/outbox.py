"""What a step has for those who listen, handed over when the step is done: once, however many answers there
are. Waking another thread for every token costs more than the token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from latentkv.generate.writer import Piece


class Listener(Protocol):
    """A ticket: on_piece takes what comes for it."""

    cancelled: bool
    on_piece: Callable[[Piece | None], None] | None


Item = tuple[Listener, Piece | None]  # None: the ticket's error is set
# Takes what has come, on the engine's thread, and calls on_piece of each ticket where it belongs.
Deliver = Callable[[Sequence[Item]], None]


class Outbox:
    def __init__(self) -> None:
        self._items: dict[Deliver, list[Item]] = {}

    def put(self, deliver: Deliver, ticket: Listener, piece: Piece | None) -> None:
        self._items.setdefault(deliver, []).append((ticket, piece))

    def flush(self) -> None:
        items, self._items = self._items, {}
        for deliver, waiting in items.items():
            try:
                deliver(waiting)
            except Exception:  # who listened is gone, an event loop that has closed: no matter of others
                for ticket, _ in waiting:
                    ticket.cancelled = True
