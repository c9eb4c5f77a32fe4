"""Text that is not UTF-8: half characters in strings, bytes on the command line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from latentkv import LatentKVError, LlamaGrammar
from latentkv.cli._errors import one_line
from latentkv.text import utf8


def test_what_is_wrong_is_said() -> None:
    assert utf8("naïve 🦙", "prompt") == "naïve 🦙".encode()
    for text, got in (
        ("a\ud800b", "a lone surrogate U+D800 at offset 1"),
        (b"ab\xff".decode(errors="surrogateescape"), "byte 0xff at offset 2"),
    ):
        with pytest.raises(LatentKVError) as caught:
            utf8(text, "prompt")
        assert str(caught.value) == f"[prompt] expected UTF-8; got {got}"


def test_calls_refuse_half_characters(scripted: Callable[..., Any]) -> None:
    llm = scripted()
    parts = [{"type": "text", "text": "a\ud800b"}]
    for call in (
        lambda: llm("a\ud800b"),
        lambda: llm("a\ud800b", stream=True),
        lambda: llm.create_chat_completion([{"role": "user", "content": "a\ud800b"}]),
        lambda: llm.create_chat_completion([{"role": "user", "content": parts}]),
    ):
        with pytest.raises(LatentKVError, match=r"^\[prompt\] expected UTF-8; got .* U\+D800 at offset 1$"):
            call()
    with pytest.raises(LatentKVError, match=r"^\[grammar\] expected UTF-8"):
        LlamaGrammar.from_string('root ::= "\udc00"')
    with pytest.raises(LatentKVError, match=r"^\[model_path\] expected UTF-8"):
        type(llm)("\udcff.gguf")


@pytest.mark.parametrize(
    ("args", "where"),
    [
        (["chat", "FILE", "-n", "2", "-p", b"\xff\xfe"], "prompt"),
        (["chat", "FILE", "-n", "2", "--raw", "-p", b"\xff\xfe"], "prompt"),
        (["chat", "FILE", "-n", "2", "-p", "x", "-sys", b"\xff"], "prompt"),
        (["info", "FILE", "--kv", b"\xff"], "--kv"),
        (["info", b"\xff.gguf"], "FILE"),
    ],
)
def test_commands(latent_gguf: Path, args: list[str | bytes], where: str) -> None:
    words = [str(latent_gguf) if word == "FILE" else word for word in args]
    done = subprocess.run([sys.executable, "-m", "latentkv", *words], capture_output=True, text=True)
    wanted = f"error: [{where}] expected UTF-8; got byte 0xff at offset 0\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", wanted)


def test_output_that_cannot_be_shown() -> None:
    with pytest.raises(UnicodeEncodeError) as caught:
        "±".encode("ascii")
    assert one_line(caught.value) == "[text] expected characters that ascii can hold; got U+00B1"
