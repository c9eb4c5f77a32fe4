"""Texts that people hand over: the same text from a file and a pipe, whichever editor wrote it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from latentkv import LatentKVError, LlamaGrammar
from latentkv.console import reading

MARK = b"\xef\xbb\xbf"
TEXT = "Say one word.\nPlease, ä.\n"
WRITTEN = {
    "plain": TEXT.encode(),
    "mark": MARK + TEXT.encode(),
    "crlf": TEXT.replace("\n", "\r\n").encode(),
    "both": MARK + TEXT.replace("\n", "\r\n").encode(),
    "cr": TEXT.replace("\n", "\r").encode(),
}


@pytest.mark.parametrize("written", WRITTEN)
def test_a_file_a_pipe_and_a_stream_are_the_same_text(tmp_path: Path, written: str) -> None:
    (tmp_path / "text").write_bytes(WRITTEN[written])
    assert reading.read_text(tmp_path / "text") == TEXT
    with (tmp_path / "text").open("rb") as stream:
        assert reading.read_stream(stream) == TEXT
    reader, writer = os.pipe()  # a shell's <(…)
    os.write(writer, WRITTEN[written])
    os.close(writer)
    assert reading.read_text(f"/dev/fd/{reader}") == TEXT
    os.close(reader)


def test_a_mark_inside_of_a_text_stays() -> None:
    assert reading.decoded(b"a" + MARK + b"b") == "a\ufeffb"


def test_other_encodings_are_named() -> None:
    with pytest.raises(LatentKVError, match=r"expected UTF-8; got UTF-16, by its byte-order mark; save it"):
        reading.decoded("text".encode("utf-16"))
    with pytest.raises(UnicodeDecodeError):
        reading.decoded(b"caf\xe9")


def test_a_pipe_that_goes_on_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LARGEST", 1000)
    process = subprocess.Popen(["yes"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with pytest.raises(LatentKVError, match="expected at most 1000 bytes of text; got more"):
        reading.read_stream(process.stdout)  # type: ignore[arg-type]
    process.stdout.close()
    process.wait()


@pytest.fixture
def odd(tmp_path: Path) -> dict[str, Path]:
    """What is no file of text."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
    return {
        "a pipe without a writer": tmp_path / "pipe",
        "a socket": tmp_path / "socket",
        "a directory": tmp_path,
        "a device": Path("/dev/zero"),
        "an empty file": tmp_path / "empty",
    }


KINDS = ["a pipe without a writer", "a socket", "a directory", "a device", "an empty file"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("option", ["MODEL", "--latent", "-f", "--grammar-file", "--chat-template-file"])
def test_what_is_no_file_is_one_line(
    run: Any, latent_gguf: Path, odd: dict[str, Path], option: str, kind: str
) -> None:
    model = odd[kind] if option == "MODEL" else latent_gguf
    more = [] if option == "MODEL" else [option, odd[kind]]
    asked = [] if option == "-f" else ["-p", "x"]
    done = run("chat", model, "-n", "2", "-c", "64", *asked, *more)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: [")
    assert done.stderr.count("\n") == 1


def test_marks_and_line_ends_of_every_text_of_a_command(run: Any, latent_gguf: Path, tmp_path: Path) -> None:
    def written(name: str, text: str) -> list[Path]:
        paths = [tmp_path / f"{name}-{how}" for how in ("plain", "both")]
        paths[0].write_bytes(text.encode())
        paths[1].write_bytes(MARK + text.replace("\n", "\r\n").encode())
        return paths

    def said(*args: object) -> str:
        done = run("chat", latent_gguf, "-n", "4", "-c", "256", "--temp", "0", *args)
        assert done.returncode == 0, done.stderr
        return str(done.stdout + done.stderr.split("|")[0].split("(")[-1])  # with the prompt's tokens

    prompt = written("prompt", TEXT)
    assert said("-f", prompt[0]) == said("-f", prompt[1])
    assert said("-p", "x", "-sysf", prompt[0]) == said("-p", "x", "-sysf", prompt[1])
    grammar = written("grammar", 'root ::= "yes" |\n  "no"\n')
    assert said("-p", "x", "--grammar-file", grammar[0]) == said("-p", "x", "--grammar-file", grammar[1])
    assert LlamaGrammar.from_file(grammar[0]).text == LlamaGrammar.from_file(grammar[1]).text
    template = written("template", "{% for m in messages %}{{ m.content }}\n{% endfor %}")
    both = [said("-p", "x", "--chat-template-file", path) for path in template]
    assert both[0] == both[1]
    command = [
        sys.executable,
        "-m",
        "latentkv",
        "chat",
        str(latent_gguf),
        "-n",
        "4",
        "-c",
        "256",
        "--temp",
        "0",
    ]
    piped = [
        subprocess.run(command, input=path.read_bytes(), capture_output=True, timeout=120).stdout.decode()
        for path in prompt
    ]
    assert piped[0] == piped[1] == run(*command[3:], "-f", prompt[0]).stdout


def test_a_scored_text_has_no_mark(run: Any, latent_gguf: Path, tmp_path: Path) -> None:
    text = "The quick brown fox jumps over the lazy dog.\n" * 80
    found = []
    for name, data in (("plain", text.encode()), ("both", MARK + text.replace("\n", "\r\n").encode())):
        (tmp_path / name).write_bytes(data)
        done = run("perplexity", latent_gguf, "-f", tmp_path / name, "-c", "64", "--chunks", "1")
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.splitlines()[0])
    assert found[0] == found[1]
