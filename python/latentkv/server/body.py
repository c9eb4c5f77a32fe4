"""Bodies are JSON, whatever their content type says. Long ones are read on a thread, in pieces: C's JSON
reader holds all threads until it is done, a quarter of a second for 15 MB."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from json.decoder import JSONArray, JSONObject  # type: ignore[attr-defined]
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.types import Scope

LONG = 1 << 18  # bytes; less is read in a few milliseconds
_LEVELS = 4  # levels of a body that are read piece by piece: its fields, the items of each, and theirs
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


class _JsonRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        try:
            return json.loads(body) if len(body) < LONG else await run_in_threadpool(parsed, body)
        except (ValueError, RecursionError) as error:
            raise HTTPException(400, f"[body] expected JSON; got {_fault(error)}") from None


def _fault(error: ValueError | RecursionError) -> str:
    """What is wrong with a body, and where."""
    if isinstance(error, json.JSONDecodeError):
        said = error.msg.removesuffix(" at")
        return f"an error at line {error.lineno}, column {error.colno}: {said[:1].lower()}{said[1:]}"
    if isinstance(error, UnicodeDecodeError):
        return f"byte 0x{error.object[error.start]:02x} at offset {error.start}, which is no UTF-8"
    if isinstance(error, RecursionError):
        return "values nested too deeply"
    return "a number of too many digits"


class Route(APIRoute):
    """A route that takes JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_JsonRequest(_without_type(request.scope), request.receive))

        return handle


def _without_type(scope: Scope) -> Scope:
    """As in llama.cpp's server, the content type has no say: curl's default is a form."""
    return {**scope, "headers": [each for each in scope["headers"] if each[0] != b"content-type"]}
