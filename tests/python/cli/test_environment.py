"""llama.cpp's environment variables."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from latentkv import LatentKVError
from latentkv.cli import _options

Capture = pytest.CaptureFixture[str]


def parsed(command: str, *words: str) -> Any:
    return _options.parse(importlib.import_module(f"latentkv.cli.{command}")._parser(), words)


def test_a_variable_is_a_flag(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    for name, value in {
        "LLAMA_ARG_MODEL": "here.gguf",
        "LLAMA_ARG_CTX_SIZE": "4096",
        "LLAMA_ARG_N_PARALLEL": "2",
        "LLAMA_ARG_CACHE_TYPE_K": "q8_0",
        "LLAMA_ARG_UBATCH": "256",
        "LLAMA_ARG_N_GPU_LAYERS": "all",
        "LLAMA_API_KEY": "secret",
        "LLAMA_ARG_NONE_SUCH": "1",
        "LLAMA_CACHE": "/tmp",
    }.items():
        monkeypatch.setenv(name, value)
    args = parsed("serve")
    assert (args.model, args.ctx_size, args.parallel, args.kv_k) == ("here.gguf", 4096, 2, "q8_0")
    assert (args.ubatch_size, args.gpu_layers, args.api_key) == (256, -1, ["secret"])
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("note: from the environment: LLAMA_API_KEY, LLAMA_ARG_CACHE_TYPE_K, ")
    assert "secret" not in said
    assert "NONE_SUCH" not in said


def test_the_command_line_has_the_last_word(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("LLAMA_ARG_MODEL", "there.gguf")
    monkeypatch.setenv("LLAMA_ARG_HF_REPO", "user/repo")
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "4096")
    for words in (["here.gguf"], ["-m", "here.gguf"]):
        args = parsed("chat", *words, "-c", "512")
        assert (args.model, args.ctx_size) == ("here.gguf", 512)
    assert "MODEL" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "mapped"),
    [
        ("LLAMA_ARG_MMAP", "0", False),
        ("LLAMA_ARG_MMAP", "off", False),
        ("LLAMA_ARG_MMAP", "on", True),
        ("LLAMA_ARG_NO_MMAP", "1", False),
    ],
)
def test_flags_without_a_value_are_on_or_off(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, mapped: bool
) -> None:
    monkeypatch.setenv(name, value)
    assert parsed("chat", "a.gguf").mmap is mapped


def test_what_is_wrong_with_a_variable(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("LLAMA_ARG_MMAP", "maybe")
    with pytest.raises(LatentKVError, match=r"\[LLAMA_ARG_MMAP\] expected on or off; got 'maybe'"):
        parsed("chat", "a.gguf")
    monkeypatch.setenv("LLAMA_ARG_MMAP", "1")
    monkeypatch.setenv("LLAMA_ARG_ROPE_FREQ_BASE", "10000")
    with pytest.raises(LatentKVError, match=r"\[--rope-freq-base\] expected an option of latentkv"):
        parsed("chat", "a.gguf")
    assert capsys.readouterr().err.startswith("note: from the environment: LLAMA_ARG_MMAP, LLAMA_ARG_ROPE")


def test_without_variables_nothing_is_said(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("LLAMA_ARG_PORT", "1")  # of the server alone
    parsed("chat", "a.gguf")
    assert capsys.readouterr().err == ""
