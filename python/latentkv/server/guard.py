"""What a request meets before its route: a key, and a limit of its body's size. Plain ASGI, so that streams
pass untouched."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from latentkv.server import errors

OPEN = ("/", "/health", "/v1/health")  # need no key, as in llama.cpp; nor does what the page consists of


class Guard:
    def __init__(
        self, app: ASGIApp, keys: Sequence[str], max_bytes: int, origins: Sequence[str] = ()
    ) -> None:
        """origins: of other pages that may call ("*": all)."""
        self.app, self.keys, self.max_bytes = app, [key.encode() for key in keys], max_bytes
        self.origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if not self._is_at_home(headers):
            said = f"[origin] expected a page of this server; got {headers['origin']}; allow it with --cors"
            await errors.response(403, said)(scope, receive, send)
            return
        if not self._may(scope["path"], scope["method"], headers):
            refusal = errors.response(401, "expected a valid API key", code="invalid_api_key")
            await refusal(scope, receive, send)
            return
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self.max_bytes:
            await self._too_large()(scope, receive, send)
            return
        seen = 0

        async def limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.max_bytes:
                raise HTTPException(413, self._limit())
            return message

        await self.app(scope, limited, send)

    def _is_at_home(self, headers: Headers) -> bool:
        """No page of another origin: a browser sends a plain POST of one without asking first."""
        origin = headers.get("origin")
        if origin is None or not self.origins.isdisjoint((origin, "*")):
            return True
        return origin.partition("://")[2] == headers.get("host")

    def _may(self, path: str, method: str, headers: Headers) -> bool:
        if not self.keys or path in OPEN or path.startswith("/page/") or method == "OPTIONS":
            return True
        given = headers.get("authorization", "").removeprefix("Bearer ").strip().encode("latin-1")
        # every key is compared: how long it takes says nothing
        return any([hmac.compare_digest(given, key) for key in self.keys])

    def _too_large(self) -> ASGIApp:
        return errors.response(413, self._limit())

    def _limit(self) -> str:
        return f"expected a body of at most {self.max_bytes} bytes; got more"
