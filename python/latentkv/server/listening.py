"""Where the server listens, and how it stops."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import stat
from collections.abc import Sequence

import uvicorn

from latentkv.errors import expected
from latentkv.server.serving import Serving

GRACE_S = 3  # for answers that are nearly complete when the server is stopped
SOCKET = ".sock"  # a host that ends so is the path of a Unix socket, as in llama.cpp's server


def bound(host: str, port: int) -> list[socket.socket]:
    """Sockets with all addresses of a host, before a model is loaded: one that is taken is known at once.
    Nobody is answered before the server runs. Raises LatentKVError."""
    if host.endswith(SOCKET):
        return [_unix(host)]
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "no host name"
        raise expected("--host", "a name or an address of this machine", f"{host}: {said}") from None
    sockets: list[socket.socket] = []
    failed: OSError | None = None
    for family, kind, protocol, _, address in dict.fromkeys(found):
        each = socket.socket(family, kind, protocol)
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            each.bind(address)
            sockets.append(each)
        except OSError as error:
            each.close()
            if failed is None or error.errno == errno.EADDRINUSE:
                failed = error
    if failed is not None and (not sockets or failed.errno == errno.EADDRINUSE):
        for each in sockets:
            each.close()
        raise _refused(host, port, failed)
    return sockets


def _refused(host: str, port: int, error: OSError) -> Exception:
    if error.errno == errno.EADDRNOTAVAIL:
        return expected("--host", "a name or an address of this machine", f"{host}: {error.strerror}")
    got = f"{host}:{port}: {error.strerror}"
    return expected("--port", "a free port", got, "choose another")


def _unix(path: str) -> socket.socket:
    """What an earlier server left is removed; a server that listens there keeps it."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if stat.S_ISSOCK(os.stat(path).st_mode):
            with contextlib.suppress(ConnectionRefusedError):
                found.connect(path)
                raise expected("--host", "a free socket", f"{path}, on which a server listens")
            os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise expected("--host", "a path for a socket", f"{path}: {error.strerror}") from None
    found.close()
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        found.bind(path)
    except OSError as error:
        raise expected("--host", "a path for a socket", f"{path}: {error.strerror or error}") from None
    return found


class Server(uvicorn.Server):
    """Answers that run when it is stopped end with an error that says so, and what was computed for them is
    kept."""

    def __init__(self, config: uvicorn.Config, serving: Serving, host: str) -> None:
        super().__init__(config)
        self._serving, self._host = serving, host

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.ensure_future(self._end_answers())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()
            released(self._host, sockets or ())  # a signal ends the process right after

    async def _end_answers(self) -> None:
        await asyncio.sleep(GRACE_S)
        await asyncio.to_thread(self._serving.close)


def shown_address(host: str, port: int) -> str:
    """As a client writes it."""
    if host.endswith(SOCKET):
        return f"http://unix:{host}:"
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def released(host: str, sockets: Sequence[socket.socket]) -> None:
    """Leaves no Unix socket behind, and no open one."""
    for each in sockets:
        each.close()
    if host.endswith(SOCKET):
        with contextlib.suppress(OSError):
            os.unlink(host)
