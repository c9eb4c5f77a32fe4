"""From the engine's thread to the event loop: an answer as an async stream that ends when its client goes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from typing import Any, TypeVar

from fastapi import Request as HttpRequest
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from latentkv.engine.engine import Engine
from latentkv.engine.request import Request, Ticket
from latentkv.generate.answer import Piece
from latentkv.server import errors

T = TypeVar("T")
MAX_UNREAD = 1 << 16  # pieces: an answer with context shift need not end, and its client need not read


class Answering:
    """One answer. Whoever stops reading cancels it."""

    def __init__(self, engine: Engine, request: Request) -> None:
        loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        self._engine = engine

        def put(piece: Piece | None) -> None:
            loop.call_soon_threadsafe(self._arrive, piece)

        self._is_over = False
        self.ticket: Ticket = engine.submit(request, put)

    def _arrive(self, piece: Piece | None) -> None:
        if self.ticket.cancelled:
            return
        if self._pieces.qsize() >= MAX_UNREAD:
            said = f"expected a client that reads; got {MAX_UNREAD} pieces unread"
            self.ticket.error = errors.Refused(408, said)
            self._engine.cancel(self.ticket)
            piece = None
        self._pieces.put_nowait(piece)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        try:
            while True:
                piece = await self._pieces.get()
                if piece is None:
                    self._is_over = True
                    assert self.ticket.error is not None
                    raise errors.of(self.ticket.error)
                self._is_over = piece.finish_reason is not None
                yield piece
                if self._is_over:
                    return
        finally:
            self.cancel()

    def after(self, text: str) -> Answering:
        """The same behind a text."""
        self._pieces.put_nowait(Piece(text))
        return self

    def cancel(self) -> None:
        if not self._is_over:
            self._engine.cancel(self.ticket)

    async def whole(self) -> list[Piece]:
        return [piece async for piece in self]


async def unless_gone(request: HttpRequest, wanted: Awaitable[T]) -> T:
    """The result; cancelled when the client goes away."""
    work = asyncio.ensure_future(wanted)
    gone = asyncio.ensure_future(_gone(request))
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


async def _gone(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def wholes(answers: Sequence[Answering]) -> list[list[Piece]]:
    """The pieces of each. The first error ends all."""
    try:
        return list(await asyncio.gather(*(answer.whole() for answer in answers)))
    finally:
        for answer in answers:
            answer.cancel()


class Streaming(StreamingResponse):
    """Ends its answers when it ends, also where its client went before the first piece was asked for."""

    def __init__(self, content: AsyncIterator[str], answers: Sequence[Answering]) -> None:
        super().__init__(content, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for answer in self._answers:
                answer.cancel()


def events(chunks: AsyncIterator[dict[str, Any]], answers: Sequence[Answering]) -> StreamingResponse:
    """Server-sent events, `[DONE]` last. An error after the first chunk is an event of its own."""

    async def lines() -> AsyncIterator[str]:
        try:
            async for chunk in chunks:
                yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
        except errors.Refused as error:
            said = errors.body(error.status, error.message, error.param, error.code)
            yield f"data: {json.dumps(said, ensure_ascii=False)}\n\n"
        yield "data: [DONE]\n\n"

    return Streaming(lines(), answers)


async def merged(streams: Iterable[AsyncIterator[T]]) -> AsyncIterator[T]:
    """Items of several streams as they come. The first error ends all."""
    queue: asyncio.Queue[tuple[bool, Any]] = asyncio.Queue()

    async def drain(stream: AsyncIterator[T]) -> None:
        try:
            async for item in stream:
                queue.put_nowait((True, item))
            queue.put_nowait((False, None))
        except Exception as error:
            queue.put_nowait((False, error))

    tasks = [asyncio.ensure_future(drain(stream)) for stream in streams]
    left = len(tasks)
    try:
        while left:
            is_item, value = await queue.get()
            if is_item:
                yield value
            elif value is not None:
                raise value
            else:
                left -= 1
    finally:
        for task in tasks:
            task.cancel()
