"""llama.cpp's habits at the command line: each of its flags is the same as one of ours, is noted, or is
refused with what to write instead."""

from __future__ import annotations

import argparse
import functools
import importlib
import re
from typing import Any

import pytest

from latentkv.cli import _llama_cpp, _options, main
from latentkv.cli._llama_cpp import Flag

COMMANDS = ("bench", "chat", "info", "perplexity", "serve")
# what a command needs beside its model to come as far as the file that is not there
REST = {"chat": ["-p", "x"], "perplexity": ["-f", __file__]}
Capture = pytest.CaptureFixture[str]


def rows() -> list[Any]:
    found = []
    for command in COMMANDS:
        for flag in _llama_cpp.flags(command):
            for name in flag.names:
                found.append(pytest.param(command, flag, name, id=f"{command} {name}"))
    return found


@functools.cache
def own(command: str) -> argparse.ArgumentParser:
    """The parser before it gets llama.cpp's flags."""
    return parser(command)


def parser(command: str) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = importlib.import_module(f"latentkv.cli.{command}")._parser()
    return made


def start(command: str, *words: str) -> int:
    return main([command, *words, "-m", "none.gguf", *REST.get(command, [])])


@pytest.mark.parametrize(("command", "flag", "name"), rows())
def test_each_row_does_what_it_says(command: str, flag: Flag, name: str, capsys: Capture) -> None:
    if name in own(command)._option_string_actions:
        pytest.fail(f"{name} is an option of latentkv {command}: the row is never read")
    if flag.verdict == "equals":
        given = options(command, name, *example(command, flag))
        same = options(command, flag.same[0], *(flag.same[1:] or example(command, flag)))
        assert given == same != options(command)
        return
    values = [flag.at[0]] if flag.at else [flag.choices[-1]] if flag.choices else ["7"] if flag.value else []
    assert start(command, name, *values) == 2
    out, err = capsys.readouterr()
    assert out == ""
    if flag.verdict == "refused":
        assert err.startswith(f"error: [{name}] expected an option of latentkv; got one of llama.cpp; ")
        assert err.endswith(f"; {flag.words}\n")
        assert err.count("\n") == 1
        return
    note, error = err.splitlines()
    assert note.startswith(f"note: no effect: {name} (")
    assert error.startswith("error: [")
    assert "none.gguf" in error
    if flag.at:
        other = next((choice for choice in flag.choices if choice not in flag.at), "cuda0")
        assert start(command, name, other) == 2
        wanted = f"error: [{name}] expected {' or '.join(flag.at)}; got {other}; {flag.words}\n"
        assert capsys.readouterr().err == wanted


def example(command: str, flag: Flag) -> list[str]:
    """A value that the option of ours takes and that is not its default."""
    if len(flag.same) > 1 or not flag.value:
        return []
    action = own(command)._option_string_actions[flag.same[0]]
    if action.choices is not None:
        return [str(next(choice for choice in action.choices if choice != action.default))]
    if action.dest == "typical_p":  # a probability
        return ["0.5"]
    return ["3"]


def options(command: str, *words: str) -> dict[str, Any]:
    made = parser(command)
    _llama_cpp.add(made)
    return vars(made.parse_args(["m.gguf", *words, *REST.get(command, [])]))


@pytest.mark.parametrize("command", COMMANDS)
def test_the_model_is_m_or_a_file(command: str, capsys: Capture) -> None:
    said = []
    for words in (["-m", "none.gguf"], ["--model", "none.gguf"], ["none.gguf"]):
        assert main([command, *words, *REST.get(command, [])]) == 2
        said.append(capsys.readouterr().err)
    assert len(set(said)) == 1
    assert "none.gguf" in said[0]
    assert main([command, "a.gguf", "-m", "b.gguf", *REST.get(command, [])]) == 2
    wanted = f"[latentkv {command}] expected one of FILE, -m FILE and -hf USER/REPO; got a.gguf and b.gguf; "
    assert wanted in capsys.readouterr().err


@pytest.mark.parametrize("word", ["-fan", "-mgx", "-ctxx", "-c4096", "-ngl99", "--kv-bud", "--temper"])
def test_an_option_has_one_spelling(word: str, capsys: Capture) -> None:
    assert start("chat", word) == 2
    said = capsys.readouterr().err.strip()
    hint = "; perhaps --" if word.startswith("--") else ""
    assert f"expected options as in latentkv chat --help; got {word}{hint}" in said


@pytest.mark.parametrize(
    ("words", "noted"),
    [
        (["-fa"], "-fa"),
        (["-fa", "on"], "-fa"),
        (["-fa", "1"], "-fa"),
        (["--flash-attn", "auto"], "--flash-attn"),
        (["-cnv"], "-cnv"),
        (["-fa", "-cnv", "--jinja"], "--jinja"),
    ],
)
def test_a_value_that_may_be_left_out(words: list[str], noted: str, capsys: Capture) -> None:
    """The next word is the value, or the FILE."""
    assert main(["chat", *words, "none.gguf", "-p", "x"]) == 2
    note, error = capsys.readouterr().err.splitlines()
    assert f"{noted} (" in note
    assert "none.gguf" in error


@pytest.mark.parametrize(
    ("given", "color"), [(["--color"], "always"), (["--color", "off"], "off"), ([], "auto")]
)
def test_color(given: list[str], color: str) -> None:
    args = _options.parse(parser("chat"), [*given, "m.gguf"])
    assert (args.model, args.color) == ("m.gguf", color)


@pytest.mark.parametrize(
    ("command", "words", "name", "value"),
    [
        ("chat", ["-ngl", "all"], "gpu_layers", -1),
        ("chat", ["-t", "-1"], "threads", -1),
        ("chat", ["-n", "-2"], "n_predict", -2),
        ("serve", ["-c", "0"], "ctx_size", 0),
        ("serve", ["-np", "-1"], "parallel", -1),
        ("chat", ["-ctk", "q8_0", "--cache-type-v", "q4_0"], "kv_v", "q4_0"),
    ],
)
def test_values_that_llama_cpp_has(command: str, words: list[str], name: str, value: object) -> None:
    assert vars(_options.parse(parser(command), ["m.gguf", *words]))[name] == value


def test_what_means_nothing_is_noted_once_and_in_one_line(capsys: Capture) -> None:
    assert start("chat", "--jinja", "-fa", "on", "--jinja") == 2
    note = capsys.readouterr().err.splitlines()[0]
    told = "--jinja (templates are always read as Jinja), -fa (attention is always fused)"
    assert note == f"note: no effect: {told}"


@pytest.mark.parametrize("command", ["chat", "serve"])
@pytest.mark.parametrize(
    ("words", "most"),
    [
        ([], 15),
        (["--draft-max", "4"], 4),
        (["--draft", "3"], 3),
        (["--draft-max", "64"], 15),
        (["--spec-draft-n-max", "0"], 0),
        (["--spec-type", "none"], 0),
        (["--spec-type", "ngram-mod,ngram-map-k"], 15),
        (["--spec-type", "ngram-mod,draft-mtp"], 15),
    ],
)
def test_how_many_tokens_are_guessed(command: str, words: list[str], most: int) -> None:
    assert _options.drafts(_options.parse(parser(command), ["x.gguf", *words])) == most


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--spec-type", "draft-eagle3"], "expected none, ngram-simple, .*got draft-eagle3"),
        (["-hfd", "nowhere"], r"\[-hfd\] expected user/repo or user/repo:quant; got 'nowhere'"),
        (["-hfd", "a/b", "-md", "c.gguf"], r"\[-md\] expected none beside -hfd; got both"),
        (["--draft-max", "3", "--spec-type", "none"], "expected 0 beside --spec-type none; got 3"),
        (["--draft-max", "-1"], "got -1"),
    ],
)
def test_guesses_that_are_not_made(words: list[str], said: str, capsys: Capture) -> None:
    assert main(["chat", "x.gguf", "-p", "x", *words]) == 2
    assert re.search(said, capsys.readouterr().err)
