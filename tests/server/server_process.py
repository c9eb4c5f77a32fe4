"""A server in a process of its own, for tests that kill it or watch how it ends."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx


@dataclass
class Process:
    """A server, and where it answers."""

    popen: subprocess.Popen[str]
    address: str


def started(model: Path, *options: str, env: dict[str, str] | None = None) -> Process:
    """A server that is up."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "latentkv",
        "serve",
        str(model),
        "--port",
        str(port),
        "-t",
        "1",
        *options,
    ]
    process = Process(
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env), f"http://127.0.0.1:{port}"
    )
    end = time.monotonic() + 60
    while True:
        try:
            httpx.get(f"{process.address}/health").raise_for_status()
            return process
        except httpx.TransportError:
            stderr = process.popen.stderr
            assert process.popen.poll() is None, stderr.read() if stderr else ""
            assert time.monotonic() < end, "the server does not come up"
            time.sleep(0.1)


def stopped(process: Process) -> str:
    """Ends the server; what it wrote to stderr."""
    process.popen.terminate()
    return process.popen.communicate(timeout=30)[1]
