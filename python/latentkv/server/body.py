"""Long bodies are read on a thread, in pieces: C's JSON reader holds all threads until it is done, a quarter
of a second for 15 MB."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from json.decoder import JSONArray, JSONObject  # type: ignore[attr-defined]
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.types import Scope

LONG = 1 << 18  # bytes; less is read in a few milliseconds
_LEVELS = 2  # levels of a body that are read piece by piece: its fields, and the items of each
_read = json.JSONDecoder().scan_once  # type: ignore[attr-defined]
Scan = Callable[[str, int], tuple[Any, int]]


def parsed(body: bytes) -> Any:
    """json.loads() in pieces, between which other threads run."""
    text = body.decode(json.detect_encoding(body), "surrogatepass")
    at = len(text) - len(text.lstrip(" \t\n\r"))
    try:
        value, end = _reader(_LEVELS)(text, at)
    except StopIteration as error:
        raise json.JSONDecodeError("Expecting value", text, error.value) from None
    if rest := text[end:].lstrip(" \t\n\r"):
        raise json.JSONDecodeError("Extra data", text, len(text) - len(rest))
    return value


def _reader(levels: int) -> Scan:
    if levels == 0:
        return _read
    inner = _reader(levels - 1)
    names: dict[str, str] = {}

    def read(text: str, at: int) -> tuple[Any, int]:
        first = text[at : at + 1]
        if first == "{":
            return JSONObject((text, at + 1), True, inner, None, None, names)
        if first == "[":
            return JSONArray((text, at + 1), inner)
        return _read(text, at)

    return read


class _LongRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        if len(body) < LONG:
            return await super().json()
        return await run_in_threadpool(parsed, body)


class Route(APIRoute):
    """A route whose bodies may be long."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_LongRequest(_as_json(request.scope), request.receive))

        return handle


def _as_json(scope: Scope) -> Scope:
    """Treats a body as JSON even if the content type says form, which curl sends by default."""
    form = (b"content-type", b"application/x-www-form-urlencoded")
    return {**scope, "headers": [each for each in scope["headers"] if each != form]}
