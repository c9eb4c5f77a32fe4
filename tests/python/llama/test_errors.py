"""What an error is to the program that catches it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from latentkv import LatentKVError, Llama, LlamaGrammar
from latentkv.errors import NoAttribute, NoMemory, absent, expected


def native_errors() -> list[Callable[[Path], Any]]:
    from latentkv import _core

    def model(path: Path, **options: Any) -> Any:
        return _core.Model(str(path), **options)

    return [
        lambda path: model(path.with_name("none.gguf")),
        lambda path: model(Path(__file__)),
        lambda path: _core.Session(model(path), kv="q7"),
        lambda path: _core.Session(model(path), n_ctx=16).decode([1] * 17),
        lambda path: _core.Session(model(path), n_ctx=16).seq_rm(99),
        lambda path: _core.Sampler(model(path), top_p=-1.0),
        lambda path: _core.ChatTemplates(model(path), "{% if %}"),
        lambda path: LlamaGrammar.from_json_schema({"type": "none such"}),
        lambda path: Llama(str(path), kv="q7"),
        lambda path: Llama(str(path), n_ctx=16)(list(range(40))),
    ]


@pytest.mark.parametrize("at", range(10))
def test_what_native_code_raises_is_a_latentkv_error(plain_gguf: Path, at: int) -> None:
    fail = native_errors()[at]
    with pytest.raises(LatentKVError, match=r"^\[.+\] expected .+") as caught:
        fail(plain_gguf)
    assert isinstance(caught.value, ValueError)  # as it was before there was one kind
    with ThreadPoolExecutor(1) as pool, pytest.raises(LatentKVError, match=r"^\[.+\] expected .+"):
        pool.submit(fail, plain_gguf).result()
    again = pickle.loads(pickle.dumps(caught.value))  # as it comes from another process
    assert (type(again), str(again)) == (type(caught.value), str(caught.value))


def test_no_memory_and_no_attribute_are_both_kinds() -> None:
    error = pickle.loads(pickle.dumps(NoMemory("[memory] expected room; got none")))
    assert isinstance(error, LatentKVError)
    assert isinstance(error, MemoryError)
    error = absent("scores", "logits_all=True", "logits_all=False")
    assert isinstance(error, NoAttribute)
    assert isinstance(error, AttributeError)
    assert str(error) == str(expected("scores", "logits_all=True", "logits_all=False"))


def test_hasattr_never_raises(plain_gguf: Path) -> None:
    fresh = Llama(str(plain_gguf), n_ctx=64)
    words = Llama(str(plain_gguf), vocab_only=True)
    closed = Llama(str(plain_gguf), n_ctx=64)
    closed.close()
    scored = Llama(str(plain_gguf), n_ctx=64, logits_all=True)
    scored.eval([1, 2, 3])
    for llm in (fresh, words, closed, scored):
        for name in dir(llm):
            assert hasattr(llm, name) in (False, True)
    assert not hasattr(fresh, "scores")
    assert not hasattr(fresh, "logits")
    assert not hasattr(words, "session")
    assert not hasattr(closed, "model")
    assert scored.scores.shape == (3, scored.n_vocab())
    with pytest.raises(LatentKVError, match=r"\[scores\] expected Llama\(…, logits_all=True\)"):
        _ = fresh.scores
