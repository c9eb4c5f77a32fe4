"""The checks before any route: the host name, an API key, and the size of the body. It is plain ASGI, so that
streams pass untouched."""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from latentkv.server import errors

KEY = "latentkv.key"  # of a request's scope: the API key that it brought, "" if none is asked for
OPEN = ("/", "/health", "/v1/health")  # need no key, as in llama.cpp; nor does what the page consists of


class Guard:
    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str],
        max_bytes: int,
        origins: Sequence[str] = (),
        hosts: Sequence[str] = ("*",),
    ) -> None:
        """origins: other pages that may call ("*": all). hosts: names under which requests may reach the
        server, without a port ("*": any)."""
        self.app, self.keys, self.max_bytes = app, [key.encode() for key in keys], max_bytes
        self.origins = frozenset(origins)
        self.hosts = frozenset(host.lower().strip("[]") for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # GET, whose body the server that runs this leaves out
            scope = {**scope, "method": "GET"}
        headers, path = Headers(scope=scope), scope["path"]
        if not self._is_called_by_name(headers.get("host")):
            got = headers["host"][:255]
            said = f"[host] expected a name of this server; got {got!r}; allow it with --allowed-hosts"
            await errors.response(path, errors.Refused(403, said))(scope, receive, send)
            return
        if not self._is_at_home(headers):
            said = f"[origin] expected a page of this server; got {headers['origin']}; allow it with --cors"
            await errors.response(path, errors.Refused(403, said))(scope, receive, send)
            return
        key = self._key(headers)
        if key is None and not self._is_open(path, scope["method"]):
            refusal = errors.Refused(401, "expected a valid API key", code="invalid_api_key")
            await errors.response(path, refusal)(scope, receive, send)
            return
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self.max_bytes:
            await errors.response(path, errors.Refused(413, self._limit()))(scope, receive, send)
            return
        seen = 0

        async def limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.max_bytes:
                raise HTTPException(413, self._limit())
            return message

        await self.app({**scope, KEY: key or ""}, limited, send)

    def _is_called_by_name(self, host: str | None) -> bool:
        """Whether the request uses an allowed host name. A page whose name leads to this address (DNS
        rebinding) is same-origin for its browser and calls the server by that name. Starlette's
        TrustedHostMiddleware would answer in plain text."""
        if host is None or "*" in self.hosts:  # browsers always send one
            return True
        try:
            return urlsplit(f"//{host}").hostname in self.hosts
        except ValueError:  # half of an IPv6 address
            return False

    def _is_at_home(self, headers: Headers) -> bool:
        """Whether the request comes from no page, or from a page of this origin. A browser sends a page's
        plain POST to another origin without asking first."""
        origin = headers.get("origin")
        if origin is None or not self.origins.isdisjoint((origin, "*")):
            return True
        return origin.partition("://")[2] == headers.get("host")

    def _is_open(self, path: str, method: str) -> bool:
        return not self.keys or path in OPEN or path.startswith("/page/") or method == "OPTIONS"

    def _key(self, headers: Headers) -> str | None:
        """The API key that a request brings."""
        given = [
            re.sub("^bearer ", "", headers.get("authorization", ""), flags=re.I).strip().encode("latin-1"),
            headers.get("x-api-key", "").strip().encode("latin-1"),  # Anthropic's clients
        ]
        # every key is compared: how long it takes says nothing
        found = [key for key in self.keys for each in given if hmac.compare_digest(each, key)]
        return found[0].decode() if found else None

    def _limit(self) -> str:
        return f"expected a body of at most {self.max_bytes} bytes; got more"


def is_loopback(bound: str) -> bool:
    """Whether a server at this address, or at this Unix socket, can be reached from this machine only."""
    try:
        return bound == "localhost" or bound.endswith(".sock") or ip_address(bound).is_loopback
    except ValueError:
        return False


def hosts_of(bound: str, more: Sequence[str] = ()) -> list[str]:
    """The names under which requests may reach a server at this address. On the loopback interface: this
    machine's names and `more`. Otherwise: the address and `more`, or any name."""
    if is_loopback(bound):
        return ["localhost", "127.0.0.1", "::1", bound, *more]
    return [bound, *more] if more else ["*"]
