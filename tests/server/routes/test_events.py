"""How events are written: a client that waits is told that the server is there; an error ends a stream."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from latentkv.generate.writer import Piece
from latentkv.server import events
from latentkv.server.answering import Inbox
from latentkv.server.errors import Refused
from latentkv.server.events import EventStream, Wire

SHAPE: Any = SimpleNamespace(lines=lambda piece: [f"says\ndata: {piece.text}"])


def written(wire: Wire, pieces: list[tuple[float, Piece | None]]) -> str:
    """What a stream sends whose pieces come after so many seconds; None: an error."""

    async def run() -> str:
        inbox, sent = Inbox(), []
        error = Refused(500, "[engine] expected a step that runs; got none")
        answer: Any = SimpleNamespace(cancel=lambda: None, error=error)

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))

        async def receive() -> Any:
            await asyncio.sleep(60)

        async def write() -> None:
            for after, piece in pieces:
                await asyncio.sleep(after)
                inbox.put(0, piece)

        writing = asyncio.ensure_future(write())
        stream = EventStream([answer], [SHAPE], inbox, ["begins\ndata: {}"], wire=wire)
        await stream({"type": "http"}, receive, send)
        await writing
        return b"".join(sent).decode()

    return asyncio.run(run())


def test_a_client_that_waits_is_pinged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "PING_S", 0.2)
    pieces = [(0.5, Piece("one")), (0.01, Piece("two")), (0.3, Piece("three", (), "stop"))]
    wire = Wire("event: ", last=(), ping=("ping\ndata: {}",))
    names = [each.split("\n")[0] for each in written(wire, pieces).strip().split("\n\n")]
    assert names == [f"event: {each}" for each in ("begins", "ping", "ping", "says", "says", "ping", "says")]
    quiet = written(Wire("event: ", last=()), pieces)
    assert "ping" not in quiet
    assert quiet.count("event: ") == 4


def test_an_error_ends_a_stream_in_the_words_of_its_interface() -> None:
    pieces = [(0.0, Piece("one")), (0.0, None)]
    wire = Wire("event: ", lambda error: [f"failed\ndata: {error.message}"], last=())
    assert written(wire, pieces).endswith(
        "event: failed\ndata: [engine] expected a step that runs; got none\n\n"
    )
    openais = written(Wire(), pieces)
    assert '"type": "server_error"' in openais
    assert openais.endswith("data: [DONE]\n\n")
