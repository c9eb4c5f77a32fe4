"""A server on the demo model, in a process of its own."""

from __future__ import annotations

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
    from server_process import started, stopped

    process = started(model, *options)
    try:
        yield process.address
    finally:
        said = stopped(process)
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
