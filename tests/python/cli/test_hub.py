"""GGUFs from huggingface.co: which file is meant, a download from a server, and the cache offline."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from latentkv import hub
from latentkv.errors import LatentKVError

pytest.importorskip("huggingface_hub")

FILES = [
    "README.md",
    "mmproj-model-f16.gguf",
    "model-IQ1_S.gguf",
    "model-Q4_K_M.gguf",
    "model-Q4_K_XL.gguf",
    "model-Q8_0-00001-of-00002.gguf",
    "model-Q8_0-00002-of-00002.gguf",
    "model.q5_k_m.gguf",
]


@pytest.mark.parametrize(
    ("quant", "pattern", "found"),
    [
        ("", "", ["model-Q4_K_M.gguf"]),
        ("q4_k_m", "", ["model-Q4_K_M.gguf"]),
        ("Q4_K_XL", "", ["model-Q4_K_XL.gguf"]),
        ("Q5_K_M", "", ["model.q5_k_m.gguf"]),
        ("Q8_0", "", ["model-Q8_0-00001-of-00002.gguf", "model-Q8_0-00002-of-00002.gguf"]),
        ("", "*Q4_K_M.gguf", ["model-Q4_K_M.gguf"]),
        ("", "mmproj-model-f16.gguf", ["mmproj-model-f16.gguf"]),
    ],
)
def test_which_file_is_meant(quant: str, pattern: str, found: list[str]) -> None:
    assert hub.choose(FILES, "a/b", quant, pattern) == found


def test_without_the_default_quantization_the_first_file_is_taken() -> None:
    assert hub.choose(["b-Q6_K.gguf", "a-Q8_0.gguf", "mmproj-a.gguf"], "a/b") == ["a-Q8_0.gguf"]


@pytest.mark.parametrize(
    ("quant", "files", "found"),
    [
        ("Q8_0", ["MTP/a-Q8_0.gguf", "a-Q8_0.gguf"], "a-Q8_0.gguf"),
        ("", ["MTP/a-Q8_0-MTP.gguf", "a-UD-Q4_K_XL.gguf", "mmproj-F16.gguf"], "a-UD-Q4_K_XL.gguf"),
        ("", ["mtp-a-q4_k_m.gguf", "a-q4_k_m.gguf"], "a-q4_k_m.gguf"),
        ("", ["a-Q4_K_M-MTP.gguf", "b-Q4_K_M.gguf"], "b-Q4_K_M.gguf"),
        ("", ["a-MTP-Q4_K_M.gguf"], "a-MTP-Q4_K_M.gguf"),  # a whole model that has such layers
        ("", ["gguf/drafter/a-Q4_K_M.gguf", "gguf/a-Q4_K_M.gguf"], "gguf/a-Q4_K_M.gguf"),
        ("Q8_0", ["a-draft-Q8_0.gguf", "a-eagle3-Q8_0.gguf", "b-Q8_0.gguf"], "b-Q8_0.gguf"),
        ("", ["eagle3-a.gguf", "z.gguf"], "z.gguf"),
        ("", ["a-Q4_K_M.imatrix.gguf", "imatrix/a-Q4_K_M.gguf", "b-Q4_K_M.gguf"], "b-Q4_K_M.gguf"),
        ("", ["Draftsman-7B-Q4_K_M.gguf", "mtpx-Q4_K_M.gguf"], "Draftsman-7B-Q4_K_M.gguf"),
    ],
)
def test_what_stands_beside_a_model_is_not_the_model(quant: str, files: list[str], found: str) -> None:
    assert hub.choose(files, "a/b", quant) == [found]


def test_a_repository_of_nothing_else() -> None:
    with pytest.raises(
        LatentKVError, match=r"expected a GGUF in a/b; got only mtp-a-Q4_K_M\.gguf, mmproj-a\.gguf"
    ):
        hub.choose(["mtp-a-Q4_K_M.gguf", "mmproj-a.gguf"], "a/b")
    assert hub.choose(["mtp-a.gguf", "b.gguf"], "a/b", pattern="mtp-*") == ["mtp-a.gguf"]


@pytest.mark.parametrize(
    ("files", "quant", "pattern", "message"),
    [
        (FILES, "Q4_K", "", r"\[-hf\] expected a GGUF Q4_K in a/b; got model-IQ1_S\.gguf, "),
        (
            FILES,
            "",
            "*Q4*",
            r"expected one file that matches \*Q4\* in a/b; got model-Q4_K_M\.gguf, model-Q4_K_XL",
        ),
        (
            FILES[:-2],
            "Q8_0",
            "",
            r"expected all 2 parts of model-Q8_0-00001-of-00002\.gguf in a/b; got no model-Q8",
        ),
        (["README.md"], "", "", r"expected a GGUF in a/b; got no GGUF"),
    ],
)
def test_no_file_is_meant(files: list[str], quant: str, pattern: str, message: str) -> None:
    with pytest.raises(LatentKVError, match=message):
        hub.choose(files, "a/b", quant, pattern)


@pytest.mark.parametrize("name", ["model", "a/b/c", "a/b:", "a/b:q 4", "../x"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(LatentKVError, match=r"\[-hf\] expected user/repo or user/repo:quant; got"):
        hub.split_name(name)


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the site as a download asks for."""

    model: bytes
    asked: list[str]
    protocol_version = "HTTP/1.1"

    def _answer(self, with_body: bool) -> None:
        self.asked.append(f"{self.command} {self.path}")
        if self.path.startswith("/api/models/user/repo"):
            siblings = [{"rfilename": name} for name in FILES]
            body = json.dumps({"id": "user/repo", "sha": "c" * 40, "siblings": siblings}).encode()
            self.send_response(200)
        elif self.path.startswith("/user/repo/resolve/main/model-Q4_K_M.gguf"):
            body = self.model
            self.send_response(200)
            self.send_header("ETag", f'"{"e" * 40}"')
            self.send_header("X-Repo-Commit", "c" * 40)
        else:
            body = b"{}"
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def do_GET(self) -> None:
        self._answer(True)

    def do_HEAD(self) -> None:
        self._answer(False)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(plain_gguf: Path) -> Iterator[tuple[str, type[Hub]]]:
    handler = type("Handler", (Hub,), {"model": plain_gguf.read_bytes(), "asked": []})
    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=served.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{served.server_port}", handler
    served.shutdown()
    served.server_close()
    thread.join()


def info(cache: Path, *arguments: str, **environment: str) -> Any:
    command = [sys.executable, "-m", "latentkv", "info", *arguments]
    names = {"HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1", **environment}
    return subprocess.run(
        command, env={**os.environ, **names}, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_model_is_downloaded_once_and_then_read_offline(
    server: tuple[str, type[Hub]], tmp_path: Path
) -> None:
    address, handler = server
    first = info(tmp_path, "-hf", "user/repo:Q4_K_M", HF_ENDPOINT=address)
    assert first.returncode == 0, first.stderr
    assert "model-Q4_K_M.gguf" in first.stdout
    downloads = [ask for ask in handler.asked if ask.startswith("GET /user")]
    assert len(downloads) == 1
    again = info(tmp_path, "-hf", "user/repo", HF_ENDPOINT=address)
    assert again.returncode == 0, again.stderr
    assert [ask for ask in handler.asked if ask.startswith("GET /user")] == downloads
    offline = info(tmp_path, "-hf", "user/repo", HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    assert offline.stdout == again.stdout


def test_words_when_there_is_nothing(server: tuple[str, type[Hub]], tmp_path: Path) -> None:
    offline = info(tmp_path, "-hf", "user/repo", HF_HUB_OFFLINE="1")
    assert offline.returncode == 2
    assert offline.stderr.startswith(
        "error: [-hf] expected to reach huggingface.co for user/repo; got no connection"
    )
    assert offline.stderr.count("\n") == 1
    unknown = info(tmp_path, "-hf", "some/other", HF_ENDPOINT=server[0])
    assert unknown.returncode == 2
    assert unknown.stderr == (
        "error: [-hf] expected a public repository; got some/other; for a private one: hf auth login\n"
    )


ONE = "[latentkv info] expected one of FILE, -m FILE and -hf USER/REPO"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [],
            f"{ONE}; got none; see latentkv info --help",
        ),
        (
            ["x.gguf", "-hf", "a/b"],
            f"{ONE}; got x.gguf and a/b; see latentkv info --help",
        ),
        (["-hff", "x.gguf"], "[--hf-file] expected -hf beside it; got none"),
        (["-hf", "abc"], "[-hf] expected user/repo or user/repo:quant; got 'abc'"),
    ],
)
def test_what_does_not_go_together(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = info(tmp_path, *arguments)
    assert (done.returncode, done.stderr) == (2, f"error: {message}\n")


def test_a_conversion_takes_the_same_names(run: Any, tmp_path: Path) -> None:
    for arguments, message in (
        ([], "[source] expected SOURCE or -hf USER/REPO; got none"),
        ([str(tmp_path), "-hf", "a/b"], "[source] expected SOURCE or -hf USER/REPO; got both"),
        (["-hf", "b"], "[-hf] expected user/repo or user/repo:quant; got 'b'"),
    ):
        done = run("convert", *arguments, "-o", str(tmp_path / "out.gguf"), "--calib", str(tmp_path / "text"))
        assert (done.returncode, done.stderr) == (2, f"error: {message}\n")


def test_llama_from_a_repository(
    server: tuple[str, type[Hub]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from latentkv import Llama

    found = info(tmp_path, "-hf", "user/repo", HF_ENDPOINT=server[0])
    assert found.returncode == 0, found.stderr
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with Llama.from_pretrained("user/repo", "*Q4_K_M.gguf", cache_dir=tmp_path, n_ctx=64) as llama:
        assert llama.n_ctx() == 64
        assert "model-Q4_K_M.gguf" in llama.model_path
