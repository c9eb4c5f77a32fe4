"""The server on a model with recurrent layers: several sequences at once, conversations that go on, and
what a store keeps from one run to the next."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hybrid_files import Hybrid, write

for module in ("fastapi", "uvicorn", "httpx", "torch"):
    pytest.importorskip(module, reason=f"needs {module}")

SYSTEM = "You are a patient teacher of very small children who ask about cats, dogs, mats and logs. " * 3


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    return write(tmp_path_factory.mktemp("hybrid") / "model.gguf")


@contextmanager
def asked(hybrid: Hybrid, *options: str) -> Iterator[Any]:
    import httpx
    from server_process import started, stopped

    process = started(hybrid.path, "--kv", "f32", "--temp", "0", *options)
    try:
        with httpx.Client(base_url=process.address, timeout=60) as client:
            yield client
    finally:
        said = stopped(process)
        assert "Traceback" not in said, said


def chat(client: Any, *messages: str) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt were cached."""
    roles = ["system", *["user", "assistant"] * len(messages)]
    shown = [{"role": role, "content": text} for role, text in zip(roles, (SYSTEM, *messages), strict=False)]
    answer = client.post("/v1/chat/completions", json={"messages": shown, "max_tokens": 8})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return body["choices"][0]["message"]["content"], cached


def test_many_at_once_say_what_each_says_alone(hybrid: Hybrid) -> None:
    texts = [f"What of {name}?" for name in ("the cat", "a dog", "two mats", "logs", "tea")]
    with asked(hybrid, "-c", "4096", "--parallel", "1") as client:
        alone = [chat(client, text)[0] for text in texts]
    with asked(hybrid, "-c", "8192", "--parallel", "3") as client, ThreadPoolExecutor(5) as pool:
        for _ in range(2):
            assert [got for got, _ in pool.map(lambda text: chat(client, text), texts)] == alone


def test_a_conversation_goes_on_from_its_snapshots(hybrid: Hybrid) -> None:
    with asked(hybrid, "-c", "4096", "--parallel", "2") as client:
        first, cached = chat(client, "What of the cat?")
        assert cached == 0
        _, cached = chat(client, "What of the cat?", first, "And then?")
        assert cached > len(SYSTEM)
        # another answer than the one that was given: from a little before the end of the prompt
        _, cached = chat(client, "What of the cat?", "Nothing at all.", "And then?")
        assert cached > len(SYSTEM)
        sizes = client.get("/cache").json()
        assert sizes["states"] > 0
        assert sizes["total"] > sizes["states"] + sizes["snapshots"]


def test_a_store_brings_conversations_back(hybrid: Hybrid, tmp_path: Path) -> None:
    options = ("-c", "2048", "--parallel", "1", "--cache-dir", str(tmp_path))
    with asked(hybrid, *options) as client:
        first, _ = chat(client, "What of the cat?")
        expected, _ = chat(client, "What of the cat?", first, "And then?")
    with asked(hybrid, *options) as client:
        got, cached = chat(client, "What of the cat?", first, "And then?")
        assert got == expected
        assert cached > len(SYSTEM)


def test_what_cannot_move_is_refused(hybrid: Hybrid) -> None:
    for options in (["--context-shift"], ["--cache-reuse", "64"]):
        command = [sys.executable, "-m", "latentkv", "serve", str(hybrid.path), *options]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert run.returncode == 2
        assert "expected a model whose layers all attend" in run.stderr.splitlines()[-1]
