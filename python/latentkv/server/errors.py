"""Errors in the shape of the interface, with their status: OpenAI's {"error": {"message", "type", "param",
"code"}}, and below /v1/messages Anthropic's {"type": "error", "error": {"type", "message"}}."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from latentkv.engine.engine import Closed
from latentkv.engine.request import StepError, TooLong
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


MAX_MESSAGE = 2000  # characters
TOO_LONG = "context_length_exceeded"


class Refused(Exception):
    """Refuses a request with this status and message."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        anthropics: str | None = None,
    ) -> None:
        """anthropics: the message in Anthropic's words, where its clients look for them."""
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.anthropics = anthropics or message


def body(error: Refused) -> dict[str, Any]:
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    told = {"message": shown(error.message), "type": kind, "param": error.param, "code": error.code}
    return {"error": told}


def anthropic_body(error: Refused) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": shown(error.anthropics)}}


def shown(message: str) -> str:
    """The message as valid UTF-8, as it may quote half a character, and not much longer than a line: it may
    quote megabytes."""
    if len(message) > MAX_MESSAGE:
        message = f"{message[: MAX_MESSAGE // 2]} … {message[-MAX_MESSAGE // 4 :]}"
    return message.encode(errors="backslashreplace").decode()


def response(path: str, error: Refused) -> JSONResponse:
    """The error response in the shape of the route."""
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
    is_anthropics = path == "/v1/messages" or path.startswith("/v1/messages/")
    return JSONResponse(anthropic_body(error) if is_anthropics else body(error), error.status, headers)


def of(error: Exception) -> Refused:
    """The refusal for an error: bad input is the client's fault, anything else the server's."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, Closed):
        return Refused(503, str(error))
    if isinstance(error, RecursionError):
        return Refused(400, "[body] expected values that are not so deep; got too many levels")
    if isinstance(error, StepError) and not error.is_asked_for:
        return Refused(500, str(error))
    if isinstance(error, TooLong):
        return _too_long(error)
    if isinstance(error, LatentKVError):
        message = str(error)
        if message.startswith("[memory]"):
            return Refused(500, message)
        is_long = message.startswith("[context]")
        return Refused(400, message, code=TOO_LONG if is_long else None)
    return Refused(500, f"{type(error).__name__}: {error}")


def _too_long(error: TooLong) -> Refused:
    """In words by which agents shorten a conversation and go on."""
    openais = f"{error}; this model's maximum context length is {error.n_ctx} tokens"
    counted = f"{'' if error.is_counted else 'at least '}{error.n_tokens} tokens"
    anthropics = f"prompt is too long: {counted} > {error.n_ctx - 1} maximum"
    return Refused(400, openais, None, TOO_LONG, f"{anthropics}; [context] {error.hint}")


def install(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        found, path = error.errors(), request.url.path
        first = found[0]
        if kinds := _kinds(found):
            name = str(first["loc"][1])
            got = error.body.get(name) if isinstance(error.body, Mapping) else error.body
            said = f"[{name}] expected {' or '.join(kinds)}; got {_short(got)}"
            return response(path, Refused(400, said, name))
        param = ".".join(str(part) for part in first["loc"][1:]) or None
        if first["type"] == "extra_forbidden":
            said = f"[{param}] expected a parameter that exists; got {param}"
            return response(path, Refused(400, said, param))
        return response(path, Refused(400, f"[{param or 'body'}] {_complaint(first)}", param))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        return response(request.url.path, Refused(error.status_code, _no_route(request, error)))

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> JSONResponse:
        return response(request.url.path, error)

    @app.exception_handler(LatentKVError)
    @app.exception_handler(RecursionError)
    @app.exception_handler(Exception)
    async def other(request: Request, error: Exception) -> JSONResponse:
        return response(request.url.path, of(error))


def _complaint(first: Mapping[str, Any]) -> str:
    """What pydantic says of a value, in our form: `expected a valid list; got 'hi'`."""
    kind, context = first["type"], first.get("ctx", {})
    if kind == "missing":
        return "expected a value; got none"
    if kind == "too_long":
        return f"expected at most {context['max_length']} items; got {context.get('actual_length') or 'more'}"
    if kind == "too_short":
        return f"expected at least {context['min_length']} items; got {context['actual_length']}"
    if kind == "string_too_short":
        return f"expected at least {context['min_length']} character; got {len(first['input'])}"
    if kind == "string_too_long":
        return f"expected at most {context['max_length']} characters; got {len(first['input'])}"
    if kind == "int_parsing_size":
        return "expected a smaller integer; got one of too many digits"
    wanted = re.fullmatch(r"Input should be (.+)", first["msg"])
    if not wanted:
        return str(first["msg"])
    said = re.sub(r"\bNone\b", "null", wanted[1])
    said = re.sub(r"a valid dictionary( or object to extract fields from)?", "an object", said)
    return f"expected {said}; got {_short(first.get('input'))}"


_ONE = {"str": "a text", "int": "an integer", "bool": "true or false", "dict[str,any]": "an object"}
_SEVERAL = {
    "str": "texts",
    "int": "integers",
    "dict[str,any]": "objects",
    "union[int,str]": "texts or integers",
}


def _kinds(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a field takes that may be of several kinds, in words. pydantic names a kind behind the field:
    ("body", "prompt", "list[int]", 0)."""
    field = found[0]["loc"][:2]
    tags = [each["loc"][2] for each in found if each["loc"][:2] == field and len(each["loc"]) > 2]
    if any(each["type"] == "string_unicode" for each in found):
        return ["UTF-8"]
    words = [_kind(tag.replace("constrained-", "")) for tag in tags if isinstance(tag, str)]
    return [word for word in dict.fromkeys(words) if word]


def _kind(tag: str) -> str:
    if not tag.startswith("list["):
        return _ONE.get(tag, "")
    inner = tag[5:-1]
    return f"a list of {_SEVERAL.get(inner) or _kind(inner).replace('a list', 'lists', 1)}"


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
