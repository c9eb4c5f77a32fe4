"""Guesses of the file's own layers (`--spec-type draft-mtp`): answers are those without, in fewer steps."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asking import TEXT, WORDS, are_whole, asked, run, scheduler
from hybrid_files import D_MODEL, layer_that_guesses, random_model, stock_tensors, write

from latentkv import Llama, _core
from latentkv.drafts import judged
from latentkv.drafts.lookup import Lookup
from latentkv.drafts.own import OwnLayers
from latentkv.engine.drafting import Drafting
from latentkv.errors import LatentKVError


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers add nothing to a token, so that each token has one that always follows it; the layer that
    guesses does the same, so that all of its guesses come true."""
    pytest.importorskip("torch")
    given = stock_tensors("qwen35", random_model("qwen35", 4, 0)) | layer_that_guesses()
    given = {name: each for name, each in given.items() if name.startswith(("blk.", "qwen35."))}
    for name, each in given.items():
        if name.endswith(("attn_output.weight", "ssm_out.weight", "ffn_down.weight")):
            given[name] = np.zeros_like(each)
    given["blk.4.nextn.eh_proj.weight"] = np.eye(D_MODEL, 2 * D_MODEL, dtype=np.float32)
    return write(tmp_path_factory.mktemp("own") / "own.gguf", given=given).path


@pytest.fixture(scope="module")
def model(file: Path) -> Any:
    return _core.Model(str(file))


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts pay on a CPU only where nearly all come true."""
    monkeypatch.setattr(judged, "LIKELY", 0.99)
    monkeypatch.setattr(judged, "LEAST_SURE", 0.0)
    monkeypatch.setattr(Lookup, "guesses", lambda *_: [])


def answers(model: Any, texts: tuple[str, ...], mtp: bool, limit: int = 60) -> tuple[Any, Any]:
    """Tokens of each, and the scheduler that wrote them."""
    one = scheduler(model, len(texts), 512 * len(texts), cache={"mtp": mtp})
    if mtp:
        own = OwnLayers(lambda: one.session)
        own.cost = 0.01
        one.drafting = Drafting(model=own)
    tickets = [asked(model, text, limit) for text in texts]
    run(one, *tickets)
    assert are_whole(one)
    return [list(ticket.progress.tokens) for ticket in tickets], one


@pytest.mark.parametrize(
    "texts", [(WORDS[0],), (WORDS[0], TEXT[3000:3200], *WORDS[1:3])], ids=["one", "four"]
)
def test_answers_are_what_they_are_without_guesses(model: Any, texts: tuple[str, ...]) -> None:
    want, plain = answers(model, texts, mtp=False)
    got, one = answers(model, texts, mtp=True)
    assert got == want
    counters = one.counters
    assert counters.accepted_tokens > 30 * len(texts)
    assert counters.accepted_tokens >= 0.95 * counters.drafted_tokens
    assert counters.steps < plain.counters.steps - 20


def test_wrong_guesses_are_given_up(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    want, _ = answers(model, (WORDS[0],), mtp=False, limit=150)
    monkeypatch.setattr(_core.Session, "guess", lambda self, seq, token, most, sure: [7] * most)
    got, one = answers(model, (WORDS[0],), mtp=True, limit=150)
    assert got == want
    assert 0 < one.counters.drafted_tokens < 60
    assert one.counters.accepted_tokens < 5


def test_what_they_take_is_counted(model: Any) -> None:
    plain, own = (_core.Session(model, n_ctx=256, kv="f16", n_guesses=3, mtp=mtp) for mtp in (False, True))
    assert plain.kv_bytes()["guesses"] == 0
    assert plain.guess_cost == 0
    assert own.kv_bytes()["guesses"] > 0
    assert own.kv_bytes()["total"] == plain.kv_bytes()["total"] + own.kv_bytes()["guesses"]
    assert 0 < own.guess_cost < 1


def test_llama_answers_with_them(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OwnLayers, "guesses", counted(OwnLayers.guesses, steps := []))
    said = []
    for options in ({}, {"mtp": True}):
        llama = Llama(str(file), n_ctx=256, n_threads=1, **options)
        said.append(llama(WORDS[0], max_tokens=40, temperature=0)["choices"][0]["text"])
        llama.close()
    assert said[0] == said[1]
    assert len(steps) > 10
    with pytest.raises(LatentKVError, match=r"\[mtp\] expected no draft_model beside it; got both"):
        Llama(str(file), n_ctx=256, mtp=True, draft_model=lambda ids: ids[:0])


def counted(call: Any, calls: list[Any]) -> Any:
    def wrapped(*given: Any) -> Any:
        calls.append(call(*given))
        return calls[-1]

    return wrapped


def test_chat_takes_them_or_says_why_not(file: Path, converted: Callable[..., Path]) -> None:
    def chat(path: Path, *words: str) -> tuple[int, str, str]:
        given = [
            sys.executable,
            "-m",
            "latentkv",
            "chat",
            "-m",
            str(path),
            "-p",
            "Hello",
            "-n",
            "12",
            "--temp",
            "0",
        ]
        done = subprocess.run([*given, *words], capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout, done.stderr

    own = ("--spec-type", "draft-mtp")
    plain = chat(file, "-c", "256")
    assert plain[0] == 0
    for types in ("draft-mtp", "ngram-simple,draft-mtp"):
        assert chat(file, "-c", "256", "--spec-type", types)[:2] == plain[:2]
    without = converted("--method", "none", "--outtype", "f32")
    for path, words, message in (
        (
            without,
            ("-c", "256"),
            "[mtp] expected a file with layers that guess further tokens (nextn_predict_layers)",
        ),
        (
            file,
            ("-c", "256", "--draft-max", "0"),
            "[--draft-max] expected 1 or more beside --spec-type draft-mtp",
        ),
        (file, ("-c", "auto"), "[--spec-type] expected -c N and no --kv-budget auto beside it"),
        (
            file,
            ("-c", "256", "-md", str(without)),
            "[mtp] expected a file of the qwen35 architecture; got llama",
        ),
        (file, ("-c", "256", "-ngld", "1"), "[-ngld] expected none beside --spec-type draft-mtp"),
    ):
        status, _, said = chat(path, *words, *own)
        assert status == 2
        assert said.splitlines()[-1].startswith(f"error: {message}"), said
