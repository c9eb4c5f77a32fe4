"""A path that is no GGUF: what it is instead, and what to do about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from latentkv import LatentKVError, Llama
from latentkv.cli import main
from latentkv.console.model_file import no_gguf

Capture = pytest.CaptureFixture[str]

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
SAFETENSORS = b"\x08\0\0\0\0\0\0\0{}      "


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "got an empty file"),
        (POINTER, "got a pointer of Git LFS in place of the file"),
        (b"\n<!DOCTYPE html><html>", "got a web page"),
        (b"<html lang=en>", "got a web page"),
        (b"tjgg\3\0\0\0", "got a model file of an early llama.cpp"),
        (SAFETENSORS, "got the checkpoint file"),
        (b"PK\3\4", "got a ZIP archive or a PyTorch checkpoint"),
    ],
)
def test_a_file_is_known_by_its_first_bytes(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert f"[model] expected a GGUF; {said} {path}" in str(no_gguf(path))


@pytest.mark.parametrize("content", [b"GGUF", b"G", b"some text", bytes(64)])
def test_the_reader_speaks_of_gguf_and_of_the_unknown(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert no_gguf(path) is None


@pytest.mark.parametrize("name", ["none.gguf", "folder/none.gguf", "./user/repo", "a/b/c", "none", "a\0b"])
def test_a_missing_file_is_the_readers_affair(name: str) -> None:
    assert no_gguf(name) is None


@pytest.mark.parametrize("name", ["user/repo", "user/repo-GGUF:Q4_K_M"])
def test_a_repository_is_asked_for_with_hf(name: str) -> None:
    assert str(no_gguf(name)).endswith(f"; -hf {name} downloads it from huggingface.co")


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name(name: str) -> None:
    assert str(no_gguf(name)) == f"[model] expected the name of a GGUF; got {name!r}"


def test_an_address() -> None:
    assert "name its repository with -hf USER/REPO" in str(no_gguf("https://huggingface.co/a/b/c.gguf"))
    assert "name its repository" in str(no_gguf(Path("https://huggingface.co/a/b/c.gguf"), converting=True))


def test_a_checkpoint_is_converted_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(SAFETENSORS)
    command = f"; latentkv convert {tmp_path} -o OUT.gguf makes one of this checkpoint"
    for path in (tmp_path, tmp_path / "model.safetensors", tmp_path / "config.json"):
        assert str(no_gguf(path)).endswith(command)
    assert no_gguf(tmp_path, converting=True) is None
    said = str(no_gguf(tmp_path / "model.safetensors", converting=True))
    assert said.endswith(f"; pass its directory {tmp_path}")
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert str(no_gguf(tmp_path)).endswith(f"; write {tmp_path / 'a.gguf'}")


@pytest.mark.parametrize("command", ["chat", "serve", "info", "perplexity", "bench", "convert"])
def test_every_command_says_so(command: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "pointer.gguf"
    path.write_bytes(POINTER)
    rest = {"perplexity": ["-f", "x"], "convert": ["-o", str(tmp_path / "o.gguf")], "chat": ["-p", "x"]}
    assert main([command, str(path), *rest.get(command, [])]) == 2
    wanted = (
        f"error: [model] expected a GGUF; got a pointer of Git LFS in place of the file {path}; git lfs pull"
    )
    assert capsys.readouterr().err.startswith(wanted)
    assert main([command, "", *rest.get(command, [])]) == 2
    assert capsys.readouterr().err.startswith("error: [")


def test_so_does_the_class(tmp_path: Path) -> None:
    path = tmp_path / "page.gguf"
    path.write_bytes(b"<!doctype html>")
    with pytest.raises(LatentKVError, match="got a web page"):
        Llama(str(path))
