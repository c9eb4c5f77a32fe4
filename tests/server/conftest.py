"""A server on the demo model, in a process of its own."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

for module in ("fastapi", "uvicorn", "httpx", "openai", "prometheus_client"):
    pytest.importorskip(module, reason=f"needs {module} (pip install '.[server,test]')")


@contextmanager
def served(model: Path, *options: str) -> Iterator[str]:
    """The address of a server that is up."""
    import httpx

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
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 60
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/health").raise_for_status()
                break
            except httpx.TransportError:
                assert process.poll() is None, process.stderr.read() if process.stderr else ""
                assert time.monotonic() < end, "the server does not come up"
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        _, said = process.communicate(timeout=30)
        assert "Traceback" not in said, said


@pytest.fixture(scope="session")
def serve() -> Callable[..., Any]:
    """`with serve(path, "-c", "256") as address:`"""
    return served


@pytest.fixture(scope="session")
def server(converted: Callable[..., Path]) -> Iterator[str]:
    plain = converted("--method", "none", "--outtype", "f32")
    with served(plain, "-c", "2048", "--kv", "f32", "--temp", "0", "--alias", "demo") as address:
        yield address


@pytest.fixture(scope="session")
def calling(converted: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The same model with a template that takes tools."""
    from latentkv.chat.formats import CHATML_TOOLS

    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(CHATML_TOOLS)
    options = ("-c", "4096", "--parallel", "2", "--kv", "f32", "--temp", "0", "--alias", "demo")
    plain = converted("--method", "none", "--outtype", "f32")
    with served(plain, *options, "--chat-template-file", str(template)) as address:
        yield address


@pytest.fixture
def http(server: str) -> Iterator[Any]:
    import httpx

    with httpx.Client(base_url=server, timeout=60) as client:
        yield client


@pytest.fixture
def openai(server: str) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)
