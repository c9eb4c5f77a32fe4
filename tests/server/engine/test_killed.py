"""A server that is killed or finds its disk full loses cached prompts only; it starts again and answers."""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from asking import WORDS
from server_process import started, stopped

KILLS = int(os.environ.get("LATENTKV_KILLS", "2"))
PROMPTS = tuple(16 * word for word in WORDS)  # long enough to be worth a place in the store
SMALL = ("-c", "512", "--parallel", "2", "--kv", "f32", "--temp", "0", "--cache-ram", "0")


@pytest.fixture(scope="module")
def plain(converted: Callable[..., Path]) -> Path:
    return converted("--method", "none", "--outtype", "f32")


def answer(address: str, prompt: str, limit: int = 4) -> tuple[str, int]:
    """The text, and how many tokens of the prompt were found in the cache."""
    body = {"prompt": prompt, "max_tokens": limit, "ignore_eos": True}
    got = httpx.post(f"{address}/v1/completions", json=body, timeout=60).raise_for_status().json()
    cached: int = got["usage"]["prompt_tokens_details"]["cached_tokens"]
    return got["choices"][0]["text"], cached


def keep_asking(address: str) -> None:
    """Prompts of which each takes another's place in the cache, until the server is gone."""
    with suppress(httpx.TransportError):
        while True:
            answer(address, random.choice(PROMPTS), 8)


def test_a_killed_server_leaves_a_folder_that_the_next_one_uses(plain: Path, tmp_path: Path) -> None:
    options = (*SMALL, "--cache-dir", str(tmp_path))
    for _ in range(KILLS):
        process = started(plain, *options)
        clients = [threading.Thread(target=keep_asking, args=[process.address]) for _ in range(3)]
        for client in clients:
            client.start()
        end = time.monotonic() + 60
        while not any(tmp_path.rglob("*.state")):
            assert time.monotonic() < end, "no prompt was written to the folder"
            time.sleep(0.05)
        time.sleep(random.uniform(0, 0.5))
        process.popen.send_signal(signal.SIGKILL)
        for client in clients:
            client.join(timeout=60)
        process.popen.communicate()
    process = started(plain, *options)
    try:
        assert not any(tmp_path.rglob("*.partial")), "what the killed server was writing is still there"
        texts = {prompt: answer(process.address, prompt)[0] for prompt in PROMPTS}
    finally:
        said = stopped(process)
    assert "Traceback" not in said
    process = started(plain, *options)  # ended in peace: its prompts come from the folder
    try:
        again = {prompt: answer(process.address, prompt) for prompt in PROMPTS}
    finally:
        stopped(process)
    assert {prompt: text for prompt, (text, _) in again.items()} == texts
    assert any(cached > 0 for _, cached in again.values())


@contextmanager
def disk_of(n_bytes: int) -> Iterator[None]:
    """What is started meanwhile writes no file that is longer, as on a disk without more room."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_a_full_disk_costs_cached_prompts_and_no_answer(plain: Path, tmp_path: Path) -> None:
    with disk_of(4096):
        process = started(plain, *SMALL, "--cache-dir", str(tmp_path))
    try:
        before = {prompt: answer(process.address, prompt)[0] for prompt in PROMPTS}
        assert {prompt: answer(process.address, prompt)[0] for prompt in PROMPTS} == before
        httpx.get(f"{process.address}/health").raise_for_status()
    finally:
        said = stopped(process)
    assert "Traceback" not in said
    lines = [line for line in said.splitlines() if line.startswith("warning: [--cache-dir]")]
    assert lines, "the full disk is not said"
    assert all("File too large" in line for line in lines)
    assert not any(tmp_path.rglob("*.state"))
