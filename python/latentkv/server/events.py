"""Server-sent events: one or several answers while they are written. Each engine step is one write per
client."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from latentkv.errors import LatentKVError
from latentkv.generate.writer import Piece
from latentkv.server import errors
from latentkv.server.answering import Answering, Inbox, until_gone

PING_S = 10  # the longest that a stream says nothing: clients and proxies leave one that is silent for longer


class Shape(Protocol):
    """How an answer's pieces become chunks of JSON."""

    def lines(self, piece: Piece) -> list[str]: ...


def dumped(chunk: dict[str, Any]) -> str:
    return json.dumps(chunk, ensure_ascii=False)


def named(event: dict[str, Any]) -> str:
    """An event with its type in front, as a line of a Wire that begins with `event: `."""
    return f"{event['type']}\ndata: {dumped(event)}"


def _failed(error: errors.Refused) -> list[str]:
    return [dumped(errors.body(error))]


@dataclass(frozen=True)
class Wire:
    """How events are written: the prefix of each line, errors, the last line, and what is said while there is
    nothing to say: a comment, or an event of the interface."""

    before: str = "data: "
    failed: Callable[[errors.Refused], Sequence[str]] = _failed
    last: Sequence[str] = ("[DONE]",)
    ping: str = ": ping\n\n"


class EventStream(Response):
    """`begin`: chunks before all; `end`: chunks after the last, before the wire's own. An error after the
    first chunk is an event of its own, and ends all. Its answers end when it does, also where its client went
    before."""

    media_type = "text/event-stream"

    def __init__(
        self,
        answers: Sequence[Answering],
        shapes: Sequence[Shape],
        inbox: Inbox,
        begin: Sequence[str] = (),
        end: Callable[[], Sequence[dict[str, Any]]] = tuple,
        wire: Wire = Wire(),
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._answers, self._shapes, self._inbox = answers, shapes, inbox
        self._begin, self._end, self._wire = begin, end, wire
        self._next_ping = time.monotonic() + PING_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(send))
        gone = asyncio.ensure_future(until_gone(receive))
        waking = asyncio.ensure_future(self._wake())
        try:
            await asyncio.wait({writing, gone}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            for each in (gone, waking, writing):
                each.cancel()
            for answer in self._answers:
                answer.cancel()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self._begin:
            await self._send(send, self._begin)
        left = len(self._answers)
        try:
            while left:
                lines: list[str] = []
                for index, piece in await self._taken(send):
                    if piece is None:
                        await self._send(send, lines)
                        raise self._answers[index].error
                    lines += self._shapes[index].lines(piece)
                    left -= piece.finish_reason is not None
                if lines:
                    await self._send(send, lines)
            await self._send(send, [dumped(chunk) for chunk in self._end()])
        except (errors.Refused, LatentKVError) as error:  # an answer that is no such message, too
            await self._send(send, self._wire.failed(errors.of(error)))
        await self._send(send, self._wire.last, more=False)

    async def _taken(self, send: Send) -> list[tuple[int, Piece | None]]:
        """What has arrived. A ping is due while nothing arrives, and where it has no text yet."""
        items = await self._inbox.take()
        if time.monotonic() >= self._next_ping:
            await self._say(send, self._wire.ping)
        return items

    async def _wake(self) -> None:
        """Wakes who waits for pieces when a ping is due. One timer, not one for every piece."""
        while True:
            await asyncio.sleep(max(self._next_ping - time.monotonic(), PING_S / 100))
            if time.monotonic() >= self._next_ping:
                self._inbox.wake()

    async def _send(self, send: Send, lines: Sequence[str], more: bool = True) -> None:
        await self._say(send, "".join([f"{self._wire.before}{line}\n\n" for line in lines]), more)

    async def _say(self, send: Send, text: str, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": text.encode(), "more_body": more})
        self._next_ping = time.monotonic() + PING_S
