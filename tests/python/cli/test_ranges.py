"""Numbers that no option takes: one line that names the option and its range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from latentkv import LatentKVError
from latentkv.cli import main

HUGE = "999999999999"


ANSWER = "[-n] expected 1 … 2147483647, or -1 (until the context is full), or -2 (the same)"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["info", "-c", HUGE], "[-c] expected 1 … 268435456, or 0 (as trained), or auto"),
        (["info", "-ub", HUGE], "[-ub] expected 1 … 65536, or 0 (the default)"),
        (["info", "--sink", HUGE], "[--sink] expected 0 … 65536"),
        (["info", "--sink", "-1"], "[--sink] expected 0 … 65536"),
        (["info", "--recent", HUGE], "[--recent] expected 0 … 1048576"),
        (["info", "--recent-ratio", "-0.5"], "[--recent-ratio] expected a number from 0 to 1"),
        (["info", "--recent-ratio", "nan"], "[--recent-ratio] expected a number from 0 to 1"),
        (["bench", "-d", f"0,{HUGE}"], "[-d] expected 0 … 268435456"),
        (["bench", "-p", HUGE], "[-p] expected 0 … 268435456"),
        (["bench", "-n", "-1"], "[-n] expected 0 … 268435456"),
        (["bench", "-t", HUGE], "[-t] expected 1 … 512, or 0 (the default), or -1 (the default)"),
        (["bench", "-r", "0"], "[-r] expected 1 … 2147483647"),
        (["chat", "-p", "x", "-c", HUGE], "[-c] expected 1 … 268435456, or 0 (as trained), or auto"),
        (["chat", "-p", "x", "-c", "x"], "[-c] expected 1 … 268435456, or 0 (as trained), or auto"),
        (["chat", "-p", "x", "-n", "0"], ANSWER),
        (["chat", "-p", "x", "-n", "-5"], ANSWER),
        (["chat", "-p", "x", "-b", "0"], "[-b] expected 1 … 2147483647"),
        (["chat", "-p", "x", "--temp", "-1"], "[--temp] expected a finite number of at least 0"),
        (
            ["chat", "-p", "x", "--repeat-last-n", HUGE],
            "[--repeat-last-n] expected 0 … 16777216, or -1 (the context)",
        ),
        (["perplexity", "-f", "t", "--parallel", "0"], "[--parallel] expected 1 … 64"),
        (["perplexity", "-f", "t", "--parallel", "-3"], "[--parallel] expected 1 … 64"),
        (["perplexity", "-f", "t", "--chunks", "0"], "[--chunks] expected 1 … 2147483647"),
    ],
)
def test_options(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    got = args[-1].removeprefix("0,")
    assert main([args[0], "none.gguf", *args[1:]]) == 2
    assert capsys.readouterr() == ("", f"error: {message}; got {got}\n")


@pytest.mark.parametrize("formats", ["q4,", ",q4", "q4,,q8"])
def test_bench_of_no_format(formats: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "none.gguf", "--kv", formats]) == 2
    line = f"error: [--kv] expected formats separated by commas; got {formats!r}\n"
    assert capsys.readouterr() == ("", line)


def test_depth_and_test_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "none.gguf", "-d", "200000000", "-p", "200000000"]) == 2
    line = "error: [-d, -p, -n] expected 1 … 268435456; got 400000000\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_ctx", 2**31),
        ("n_ctx", -1),
        ("n_ctx", 2.5),
        ("n_batch", 0),
        ("n_ubatch", 2**40),
        ("n_seq_max", 2**40),
        ("n_threads", 2**40),
        ("n_gpu_layers", 2**40),
        ("sink", 2**40),
        ("recent", 2**40),
        ("recent_ratio", -0.5),
        ("last_n_tokens_size", 2**40),
    ],
)
def test_llama(scripted: Callable[..., Any], name: str, value: float) -> None:
    with pytest.raises(LatentKVError, match=rf"^\[{name}\] expected .*; got {value}$"):
        scripted(**{name: value})


def test_chat_format_is_refused_at_once(scripted: Callable[..., Any]) -> None:
    wanted = (
        r"^\[chat_format\] expected None \(the file's own\) or one of chatml, chatml-function-calling, "
        r"llama-2, llama-3, gemma, mistral-instruct; got 'nope'; pass chat_template$"
    )
    with pytest.raises(LatentKVError, match=wanted):
        scripted(chat_format="nope")
    assert "<|im_start|>" in scripted(chat_format="chatml").chat_template.source


@pytest.mark.parametrize("call", ["create_completion", "create_chat_completion"])
@pytest.mark.parametrize(
    ("name", "value"), [("top_k", 2**40), ("seed", 2**40), ("seed", -2), ("max_tokens", 2.5)]
)
def test_calls(scripted: Callable[..., Any], call: str, name: str, value: float) -> None:
    prompt: Any = "xy" if call == "create_completion" else [{"role": "user", "content": "xy"}]
    with pytest.raises(LatentKVError, match=rf"^\[{name}\] expected .*; got {value}$"):
        getattr(scripted(), call)(prompt, **{name: value})


def test_bias_of_no_token(scripted: Callable[..., Any]) -> None:
    with pytest.raises(LatentKVError, match=r"^\[logit_bias\] expected 0 … 2147483647; got 1099511627776$"):
        scripted()("xy", logit_bias={2**40: 1.0})


def test_no_limit_is_still_said_in_three_ways(scripted: Callable[..., Any], script: Any) -> None:
    script.say(2, b"a", b"b", b"c")
    for max_tokens in (None, 0, -1):
        assert scripted()("xy", max_tokens=max_tokens)["choices"][0]["text"] == "abc"
    # NumPy's integers are integers
    assert scripted(n_ctx=np.int64(64))("xy", max_tokens=np.int32(2))["choices"][0]["text"] == "ab"
