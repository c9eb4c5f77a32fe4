"""Strings of a downloaded file reach no terminal as commands, and forge no line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from gguf_files import plain, rewritten

from conftest import TEXT, Tiny
from latentkv.cli import main

core = pytest.importorskip("latentkv._core", reason="needs the native module (pip install .)")

FORGED = "name\x1b]52;c;aGk=\x07\x1b[2J\x9b31m\u202e\u2028\nfile     /elsewhere\rerror: fine"
OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@pytest.fixture(scope="module")
def stock(random_checkpoint: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stock")
    return plain(random_checkpoint(folder / "tiny", "llama"), folder / "stock.gguf")


CHANGES: dict[str, dict[str, Any]] = {
    "name": {"keys": {"general.name": FORGED}},
    "architecture": {"keys": {"general.architecture": FORGED}},
    "tokenizer": {"keys": {"tokenizer.ggml.model": FORGED}},
    "splits": {"keys": {"tokenizer.ggml.pre": FORGED}},
    "scaling": {"keys": {"llama.rope.scaling.type": FORGED}},
    "recipe": {"keys": {"latentkv.source.recipe": FORGED, "latentkv.source.method": FORGED}},
    "a key of ours": {"keys": {f"latentkv.{FORGED}": 1}},
    "template": {"keys": {"tokenizer.chat_template": "{{ raise_exception('" + FORGED + "') }}"}},
    "template that does not parse": {"keys": {"tokenizer.chat_template": "{% " + FORGED}},
}


@pytest.mark.parametrize("change", CHANGES)
def test_no_command_prints_it(
    change: str, stock: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = rewritten(stock, tmp_path / "x.gguf", **CHANGES[change])
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    out = ["-o", str(tmp_path / "out.gguf")]
    commands = [
        ["info", str(path)],
        ["info", str(path), "--json"],
        ["chat", str(path), "-p", "x", "-n", "2", "-c", "64"],
        ["perplexity", str(path), "-f", str(text), "-c", "32", "--chunks", "1"],
        ["bench", str(path), "-p", "1", "-n", "1", "-r", "1"],
        ["convert", str(path), *out, "--method", "none"],
    ]
    capfd.readouterr()
    said = ""
    for command in commands:
        status = main(command)
        captured = capfd.readouterr()
        assert status in (0, 2), (command, captured)
        if status == 2:
            assert captured.err.count("\n") == 1, captured.err
        errors = "" if command[0] == "chat" and status == 0 else captured.out
        for stream in (errors, captured.err):  # an answer is the model's
            assert not OBEYED.search(stream), (command, stream)
            assert not re.search(r"^(file +/elsewhere|error: fine)", stream, re.MULTILINE), command
        said += captured.out + captured.err
    if change == "name":
        assert r"name\x1b]52;c;aGk=\x07\x1b[2J" in said


def test_a_path_is_spelled_alike_on_both_sides(tmp_path: Path) -> None:
    from latentkv.console.printable import printable

    for letters in ("a\x1b[2J", "\x9b31m", "\u202eabc", "é\u2028", "plain", "\x7f\x00"[:1]):
        with pytest.raises(core.Error) as refused:
            core.Model(str(tmp_path / letters))
        assert printable(letters) in str(refused.value)
