"""A server that is killed or finds its disk full loses cached prompts only; it starts again and answers."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from asking import WORDS
from server_process import Process, started, stopped

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


@pytest.fixture(scope="module")
def wanted(plain: Path) -> dict[str, str]:
    """What a server answers that keeps no files."""
    process = started(plain, *SMALL)
    try:
        return {prompt: answer(process.address, prompt)[0] for prompt in PROMPTS}
    finally:
        stopped(process)


@pytest.fixture
def slow_disk(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a process whose files take 50 ms to get their names: a busy test sees them before."""
    folder = tmp_path_factory.mktemp("slow")
    (folder / "sitecustomize.py").write_text(
        "import os, time\n"
        "rename = os.replace\n"
        "os.replace = lambda *paths: (time.sleep(0.05), rename(*paths))\n"
    )
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def kill_while_it_writes(process: Process, folder: Path) -> bool:
    """Whether the server left a file that is not whole."""
    end = time.monotonic() + 60
    while not any(path.suffix == ".partial" for path in folder.rglob("*")):
        assert time.monotonic() < end, "no prompt was written to the folder"
    process.popen.send_signal(signal.SIGKILL)
    process.popen.communicate()
    return any(folder.rglob("*.partial"))


def test_a_killed_server_leaves_a_folder_that_the_next_one_uses(
    plain: Path, wanted: dict[str, str], tmp_path: Path, slow_disk: dict[str, str]
) -> None:
    options = (*SMALL, "--cache-dir", str(tmp_path))
    n_halves = 0
    for _ in range(20 * KILLS):
        process = started(plain, *options, env=slow_disk)
        assert not any(tmp_path.rglob("*.partial")), "what the killed server was writing is still there"
        clients = [threading.Thread(target=keep_asking, args=[process.address]) for _ in range(3)]
        for client in clients:
            client.start()
        n_halves += kill_while_it_writes(process, tmp_path)
        for client in clients:
            client.join(timeout=60)
        if n_halves >= KILLS:
            break
    assert n_halves >= KILLS, "no server was killed in the middle of a file"
    for is_killed in (True, False):
        process = started(plain, *options)
        try:
            assert not any(tmp_path.rglob("*.partial"))
            got = {prompt: answer(process.address, prompt) for prompt in PROMPTS}
        finally:
            said = stopped(process)
        assert "Traceback" not in said
        assert {prompt: text for prompt, (text, _) in got.items()} == wanted
        assert is_killed or any(cached > 0 for _, cached in got.values())


@pytest.mark.parametrize("damage", ["half", "a bit", "empty"])
def test_a_file_that_a_power_cut_damaged_is_never_read(
    plain: Path, wanted: dict[str, str], tmp_path: Path, damage: str
) -> None:
    options = (*SMALL, "--cache-dir", str(tmp_path))
    process = started(plain, *options)
    try:
        for prompt in PROMPTS:
            answer(process.address, prompt)
    finally:
        stopped(process)
    files = [path for path in tmp_path.rglob("*") if path.suffix in (".state", ".rows")]
    assert len(files) >= len(PROMPTS)
    for path in files:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes({"half": data[: len(data) // 2], "a bit": data, "empty": b""}[damage])
    process = started(plain, *options)
    try:
        got = {prompt: answer(process.address, prompt) for prompt in PROMPTS}
    finally:
        said = stopped(process)
    assert "Traceback" not in said
    assert got == {prompt: (text, 0) for prompt, text in wanted.items()}


@contextmanager
def disk_of(n_bytes: int) -> Iterator[None]:
    """What is started meanwhile writes no file that is longer, as on a disk without more room."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_a_file_that_may_not_grow_costs_cached_prompts_and_no_answer(
    plain: Path, wanted: dict[str, str], tmp_path: Path
) -> None:
    with disk_of(4096):
        process = started(plain, *SMALL, "--cache-dir", str(tmp_path))
    try:
        for _ in range(2):
            assert {prompt: answer(process.address, prompt)[0] for prompt in PROMPTS} == wanted
        httpx.get(f"{process.address}/health").raise_for_status()
    finally:
        said = stopped(process)
    assert "Traceback" not in said
    assert warnings(said), "the full disk is not said"
    assert all("File too large" in line for line in warnings(said))
    assert not any(tmp_path.rglob("*.state"))


def warnings(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("warning: [--cache-dir]")]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for two of the prompts."""
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(tmp_path)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"needs mount: {error}")
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a disk: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_costs_cached_prompts_and_no_answer(
    plain: Path, wanted: dict[str, str], disk: Path
) -> None:
    """It fills up under the server, and has room again."""
    filler = disk / "filler"
    process = started(plain, *SMALL, "--cache-dir", str(disk))
    try:
        answer(process.address, PROMPTS[0])
        answer(process.address, PROMPTS[1])
        answer(process.address, PROMPTS[2])  # takes the place of the first
        first = set(disk.rglob("*.state"))
        assert first
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        for _ in range(2):
            assert {prompt: answer(process.address, prompt)[0] for prompt in PROMPTS} == wanted
        assert not any(disk.rglob("*.partial"))
        filler.unlink()
        for prompt in PROMPTS[:3]:
            assert answer(process.address, prompt)[0] == wanted[prompt]
        assert set(disk.rglob("*.state")) - first, "nothing is written once there is room"
    finally:
        said = stopped(process)
    assert "Traceback" not in said
    assert warnings(said), "the full disk is not said"
    assert all("No space left on device" in line for line in warnings(said))
    process = started(plain, *SMALL, "--cache-dir", str(disk))
    try:
        got = {prompt: answer(process.address, prompt) for prompt in PROMPTS}
    finally:
        stopped(process)
    assert {prompt: text for prompt, (text, _) in got.items()} == wanted
    assert any(cached > 0 for _, cached in got.values())
