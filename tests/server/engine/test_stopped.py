"""Where a server listens, and what its clients and its cache get when it is stopped."""

from __future__ import annotations

import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from server_process import started, stopped

SMALL = ("-c", "2048", "--parallel", "2", "--kv", "f32", "--temp", "0")
LONG = {"prompt": "The clerk sat down. " * 40, "max_tokens": 400, "ignore_eos": True}
MANY = LONG | {"n": 32}  # more than a few seconds


@pytest.fixture(scope="module")
def plain(converted: Callable[..., Path]) -> Path:
    return converted("--method", "none", "--outtype", "f32")


def test_running_answers_end_with_an_error_and_are_kept(plain: Path, tmp_path: Path) -> None:
    process = started(plain, *SMALL, "--cache-dir", str(tmp_path))
    url, found = f"{process.address}/v1/completions", {}

    def whole() -> None:
        found["whole"] = httpx.post(url, json=MANY, timeout=60)

    def stream() -> None:
        found["stream"] = httpx.post(url, json=MANY | {"stream": True}, timeout=60)

    threads = [threading.Thread(target=each) for each in (whole, stream)]
    for thread in threads:
        thread.start()
    while not any(slot.get("n_decoded") for slot in httpx.get(f"{process.address}/slots").json()):
        time.sleep(0.01)
    said = stopped(process)
    for thread in threads:
        thread.join()
    assert "Traceback" not in said, said
    assert found["whole"].status_code == 503
    assert found["whole"].json()["error"]["message"] == "[engine] expected to go on; got closed"
    assert '"[engine] expected to go on; got closed"' in found["stream"].text.split("\n\n")[-3]
    again = started(plain, *SMALL, "--cache-dir", str(tmp_path))
    try:
        answer = httpx.post(
            f"{again.address}/v1/completions", json=LONG | {"max_tokens": 1}, timeout=60
        ).json()
    finally:
        stopped(again)
    usage = answer["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


def refused(model: Path, *options: str) -> str:
    command = [sys.executable, "-m", "latentkv", "serve", str(model), "-c", "256", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    return done.stderr.splitlines()[-1]


def test_an_address_that_cannot_be_had_is_named(plain: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refused(plain, "--port", str(port))
    assert said.startswith(f"error: [--port] expected a free port; got 127.0.0.1:{port}: ")
    for host in ("nowhere.invalid", "192.0.2.1", str(tmp_path / "none" / "x.sock")):
        assert refused(plain, "--host", host).startswith("error: [--host] expected ")


def listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True


def test_a_unix_socket(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # such paths are short
    path = Path("x.sock")
    with socket.socket(socket.AF_UNIX) as left:  # by a server that was killed
        left.bind(str(path))
    command = [sys.executable, "-m", "latentkv", "serve", str(plain), "-c", "256", "--host", str(path)]
    popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not listens(path):
        assert popen.poll() is None
        assert time.monotonic() < end
        time.sleep(0.1)
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as client:
        answer = client.post("/completion", json={"prompt": "x", "n_predict": 2, "ignore_eos": True})
        assert answer.json()["tokens_predicted"] == 2
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert "on which a server listens" in refused(plain, "--host", str(path))
    popen.terminate()
    said = popen.communicate(timeout=30)[1]
    assert "warning" not in said, said
    assert not path.exists()
