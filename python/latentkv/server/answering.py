"""Passes answers from the engine's thread to the event loop, and cancels them when their client
disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import Awaitable, Sequence
from typing import TypeVar
from weakref import WeakKeyDictionary

from fastapi import Request as HttpRequest
from starlette.types import Receive

from latentkv.engine.engine import Engine
from latentkv.engine.outbox import Deliver, Item
from latentkv.engine.request import Request, Ticket
from latentkv.generate.writer import Piece
from latentkv.server import errors

T = TypeVar("T")
MAX_UNREAD = 1 << 16  # pieces: an answer with context shift need not end, and its client need not read

_deliveries: WeakKeyDictionary[asyncio.AbstractEventLoop, Deliver] = WeakKeyDictionary()


def _delivery() -> Deliver:
    """The delivery of the running loop, which is woken once per engine step."""
    loop = asyncio.get_running_loop()
    if loop not in _deliveries:
        where = weakref.ref(loop)

        def deliver(items: Sequence[Item]) -> None:
            there = where()
            if there is None:
                raise RuntimeError("the loop is gone")
            there.call_soon_threadsafe(_arrive, items)

        _deliveries[loop] = deliver
    return _deliveries[loop]


def _arrive(items: Sequence[Item]) -> None:
    for ticket, piece in items:
        if ticket.on_piece is not None:
            ticket.on_piece(piece)


class Inbox:
    """The pieces of one response's answers that have arrived and wait to be taken."""

    def __init__(self) -> None:
        self._items: deque[tuple[int, Piece | None]] = deque()
        self._taker: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, index: int, piece: Piece | None) -> None:
        """Adds a piece of an answer. None means that the answer has ended with its error."""
        self._items.append((index, piece))
        self.wake()

    def wake(self) -> None:
        if self._taker is not None and not self._taker.done():
            self._taker.set_result(None)

    async def take(self) -> list[tuple[int, Piece | None]]:
        """All pieces that have arrived, at least one; nothing if it was woken for another reason."""
        if not self._items:
            self._taker = asyncio.get_running_loop().create_future()
            await self._taker
            self._taker = None
        items = list(self._items)
        self._items.clear()
        return items


class Answering:
    """One answer. Its pieces arrive in an inbox under its index. Whoever stops reading has to cancel it."""

    def __init__(self, engine: Engine, request: Request, inbox: Inbox, index: int = 0) -> None:
        self._engine, self._inbox, self._index = engine, inbox, index
        self._is_over = False
        self.ticket: Ticket = engine.submit(request, self._arrive, _delivery())

    def _arrive(self, piece: Piece | None) -> None:
        if self.ticket.cancelled or self._is_over:
            return
        if len(self._inbox) >= MAX_UNREAD:
            said = f"expected a client that reads; got {MAX_UNREAD} pieces unread"
            self.ticket.error = errors.Refused(408, said)
            self.cancel()
            piece = None
        self._is_over = piece is None or piece.finish_reason is not None
        self._inbox.put(self._index, piece)

    @property
    def error(self) -> errors.Refused:
        """The error that ended the answer, after None has arrived."""
        assert self.ticket.error is not None
        return errors.of(self.ticket.error)

    def cancel(self) -> None:
        if not self._is_over:
            self._engine.cancel(self.ticket)


async def unless_gone(request: HttpRequest, wanted: Awaitable[T]) -> T:
    """The result. It is cancelled when the client disconnects."""
    work = asyncio.ensure_future(wanted)
    gone = asyncio.ensure_future(until_gone(request.receive))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise errors.Refused(499, "the client closed the connection")
        return work.result()
    finally:
        gone.cancel()
        if not work.done():
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work


async def until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def wholes(answers: Sequence[Answering], inbox: Inbox) -> list[list[Piece]]:
    """All pieces of each answer. The first error ends them all."""
    pieces: list[list[Piece]] = [[] for _ in answers]
    left = len(answers)
    try:
        while left:
            for index, piece in await inbox.take():
                if piece is None:
                    raise answers[index].error
                pieces[index].append(piece)
                left -= piece.finish_reason is not None
        return pieces
    finally:
        for answer in answers:
            answer.cancel()
