"""Errors in the shape of the interface, with their status: OpenAI's {"error": {"message", "type", "param",
"code"}}, and below /v1/messages Anthropic's {"type": "error", "error": {"type", "message"}}."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from latentkv.engine.engine import Closed
from latentkv.engine.request import StepError
from latentkv.errors import LatentKVError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    501: "not_supported_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    503: "overloaded_error",
}


class Refused(Exception):
    """Refuses a request with this status and message."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


def body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": shown(message), "type": kind, "param": param, "code": code}}


def anthropic_body(status: int, message: str) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": shown(message)}}


def shown(message: str) -> str:
    """The message as valid UTF-8; it may quote half a character."""
    return message.encode(errors="backslashreplace").decode()


def response(
    path: str, status: int, message: str, param: str | None = None, code: str | None = None
) -> JSONResponse:
    """The error response in the shape of the route."""
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return JSONResponse(anthropic_body(status, message), status, headers)
    return JSONResponse(body(status, message, param, code), status, headers)


def of(error: Exception) -> Refused:
    """The refusal for an error: bad input is the client's fault, anything else the server's."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, Closed):
        return Refused(503, str(error))
    if isinstance(error, StepError) and not error.is_asked_for:
        return Refused(500, str(error))
    if isinstance(error, LatentKVError):
        message = str(error)
        if message.startswith("[memory]"):
            return Refused(500, message)
        is_long = message.startswith("[context]")
        return Refused(400, message, code="context_length_exceeded" if is_long else None)
    return Refused(500, f"{type(error).__name__}: {error}")


def install(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first, path = error.errors()[0], request.url.path
        param = ".".join(str(part) for part in first["loc"][1:]) or None
        if first["type"] == "json_invalid":
            return response(
                path, 400, f"expected JSON; got {first.get('ctx', {}).get('error', first['msg'])}"
            )
        if first["type"] == "extra_forbidden":
            return response(path, 400, f"[{param}] expected a parameter that exists; got {param}", param)
        return response(path, 400, f"[{param or 'body'}] {_complaint(first)}", param)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        return response(request.url.path, error.status_code, _no_route(request, error))

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> JSONResponse:
        return response(request.url.path, error.status, error.message, error.param, error.code)

    @app.exception_handler(LatentKVError)
    @app.exception_handler(Exception)
    async def other(request: Request, error: Exception) -> JSONResponse:
        found = of(error)
        return response(request.url.path, found.status, found.message, found.param, found.code)


def _complaint(first: Mapping[str, Any]) -> str:
    """What pydantic says of a value, in our form: `expected a valid list; got 'hi'`."""
    if first["type"] == "missing":
        return "expected a value; got none"
    wanted = re.fullmatch(r"Input should be (.+)", first["msg"])
    return f"expected {wanted[1]}; got {_short(first.get('input'))}" if wanted else str(first["msg"])


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


def _no_route(request: Request, error: HTTPException) -> str:
    path = shown(request.url.path)
    if error.status_code == 405:
        return (
            f"[{path}] expected {(error.headers or {}).get('Allow', 'another method')}; got {request.method}"
        )
    if error.status_code != 404:
        return str(error.detail)
    hint = "; OpenAI's interface is at /v1" if path.startswith("/api/") else ""  # Ollama's
    return f"[{path}] expected a route of this server; got none of this name{hint}"
