"""Llama.embed and create_embedding: llama-cpp-python's shapes, transformers' numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latentkv import Llama
from latentkv.errors import LatentKVError
from latentkv.session import pooling

TEXTS = ["The clerk of the town wrote numbers into a book.", "A bridge leads over the river."]


@pytest.fixture(scope="module")
def plain(converted: Callable[..., Path]) -> str:
    return str(converted("--method", "none", "--outtype", "f32"))


@pytest.fixture(scope="module")
def states(demo: Path, plain: str) -> list[Any]:
    """transformers' hidden states behind the last norm, of each text, [n, n_embd]."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    checkpoint = transformers.AutoModel.from_pretrained(demo, dtype=torch.float32)
    vocabulary = Llama(plain, vocab_only=True)
    with torch.no_grad():
        ids = [vocabulary.tokenize(text.encode()) for text in TEXTS]
        return [checkpoint(torch.tensor([each])).last_hidden_state[0].numpy() for each in ids]


def near(got: Any, want: Any) -> bool:
    return bool(np.linalg.norm(np.array(got) - want) < 1e-4 * np.linalg.norm(want))


@pytest.mark.parametrize("options", [{}, {"n_ubatch": 5}, {"prefill": "lazy"}, {"n_batch": 4}], ids=str)
def test_states_are_those_of_transformers(plain: str, states: list[Any], options: dict[str, Any]) -> None:
    llm = Llama(plain, kv="f32", embedding=True, **options)
    found = llm.embed(TEXTS)  # as llama-cpp-python: the file names no pooling, and each token has its own
    assert all(near(got, want) for got, want in zip(found, states, strict=True))
    assert not near(np.array(found[0]) * 1.001, states[0])
    assert near(llm.embed(TEXTS[1]), states[1])


@pytest.mark.parametrize(
    ("kind", "number", "of"),
    [("mean", 1, lambda s: s.mean(axis=0)), ("cls", 2, lambda s: s[0]), ("last", 3, lambda s: s[-1])],
)
def test_pooling(plain: str, states: list[Any], kind: str, number: int, of: Callable[[Any], Any]) -> None:
    for asked in (kind, number):
        llm = Llama(plain, kv="f32", pooling_type=asked)
        assert llm.pooling_type() == number
        assert near(llm.embed(TEXTS[0]), of(states[0]))
    vector, count = llm.embed(TEXTS[0], normalize=True, return_count=True)
    assert count == len(states[0])
    assert near(vector, of(states[0]) / np.linalg.norm(of(states[0])))
    answer = llm.create_embedding(TEXTS, model="name")
    assert (answer["object"], answer["model"]) == ("list", "name")
    assert [each["index"] for each in answer["data"]] == [0, 1]
    assert near(answer["data"][1]["embedding"], of(states[1]))
    counted = sum(map(len, states))
    assert answer["usage"] == {"prompt_tokens": counted, "total_tokens": counted}


def test_answers_and_logits_are_as_before(plain: str) -> None:
    llm = Llama(plain, kv="f32")

    def answer() -> tuple[str, bytes]:
        llm.reset()
        text = llm("The clerk", max_tokens=20, temperature=0)["choices"][0]["text"]
        return text, llm.logits.tobytes()

    before = answer()
    llm.embed(TEXTS)
    assert llm.n_tokens == 0
    assert answer() == before


def test_a_stream_goes_on_behind_an_embedding(plain: str) -> None:
    llm = Llama(plain, kv="f32")
    whole = llm("The clerk", max_tokens=20, temperature=0)["choices"][0]["text"]
    stream = llm("The clerk", max_tokens=20, temperature=0, stream=True)
    text = next(stream)["choices"][0]["text"]
    llm.embed(TEXTS[0])
    assert text + "".join(each["choices"][0]["text"] for each in stream) == whole


def test_a_long_text_is_cut_or_refused(plain: str) -> None:
    llm = Llama(plain, kv="f32", n_ctx=64)
    text = "word " * 100
    assert len(llm.embed(text)) == 64
    with pytest.raises(LatentKVError, match=r"\[context\] expected at most 64 cells"):
        llm.embed(text, truncate=False)
    assert len(llm.embed("word")) > 0


@pytest.mark.parametrize("kind", ["rank", 4, 7, "median"])
def test_other_pooling_is_refused(plain: str, kind: Any) -> None:
    with pytest.raises(LatentKVError, match=r"\[pooling_type\] expected none or mean or cls or last"):
        Llama(plain, pooling_type=kind)


def test_a_file_may_say_how_it_is_pooled() -> None:
    keys = {"general.architecture": "qwen3", "qwen3.pooling_type": 3}
    assert pooling.chosen(None, keys) == "last"
    assert pooling.chosen("mean", keys) == "mean"
    assert pooling.chosen(None, {"general.architecture": "qwen3"}, "mean") == "mean"
    with pytest.raises(LatentKVError, match=r"\[qwen3.pooling_type\] expected .* got rank"):
        pooling.chosen(None, keys | {"qwen3.pooling_type": 4})
