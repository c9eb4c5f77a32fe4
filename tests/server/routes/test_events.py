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
                if after:
                    await asyncio.sleep(after)
                inbox.put(0, piece)

        writing = asyncio.ensure_future(write())
        stream = EventStream([answer], [SHAPE], inbox, ["begins\ndata: {}"], wire=wire)
        await stream({"type": "http"}, receive, send)
        await writing
        return b"".join(sent).decode()

    return asyncio.run(run())


@pytest.mark.parametrize("ping", ["event: ping\ndata: {}\n\n", Wire().ping])
def test_a_client_that_waits_is_told_so(monkeypatch: pytest.MonkeyPatch, ping: str) -> None:
    monkeypatch.setattr(events, "PING_S", 0.2)
    pieces = [(0.5, Piece("one")), (0.01, Piece("two")), (0.3, Piece("three", (), "stop"))]
    said = written(Wire("event: ", last=(), ping=ping), pieces).strip().split("\n\n")
    first = ping.split("\n")[0]
    assert [each.split("\n")[0] for each in said] == [
        *("event: begins", first, first, "event: says", "event: says", first, "event: says")
    ]


def test_the_comment_is_no_event() -> None:
    from openai._streaming import SSEDecoder

    decoder = SSEDecoder()
    lines = f"{Wire().ping}data: 5\n".splitlines()
    assert [decoder.decode(line) for line in lines] == [None] * len(lines)
    assert decoder.decode("").data == "5"


def test_pieces_without_a_text_are_no_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "PING_S", 0.1)
    monkeypatch.setattr(SHAPE, "lines", lambda piece: [piece.text] if piece.finish_reason else [])
    pieces = [*((0.04, Piece("held")) for _ in range(10)), (0.0, Piece("all", (), "stop"))]
    said = written(Wire(last=()), pieces)
    assert 2 <= said.count(Wire().ping) <= 4
    assert said.endswith("data: all\n\n")


def test_an_error_ends_a_stream_in_the_words_of_its_interface() -> None:
    pieces = [(0.0, Piece("one")), (0.0, None)]
    wire = Wire("event: ", lambda error: [f"failed\ndata: {error.message}"], last=())
    assert written(wire, pieces).endswith(
        "event: failed\ndata: [engine] expected a step that runs; got none\n\n"
    )
    openais = written(Wire(), pieces)
    assert '"type": "server_error"' in openais
    assert openais.endswith("data: [DONE]\n\n")


def test_what_comes_together_with_an_error_is_written_before_it() -> None:
    wire = Wire("event: ", lambda error: ["failed\ndata: 500"], last=())
    said = written(wire, [(0.0, Piece("one")), (0.0, Piece("two")), (0.0, None)])
    assert [line.split("data: ")[1] for line in said.strip().split("\n\n")] == ["{}", "one", "two", "500"]
