"""Arguments that clients pass by mistake, or as None for what they leave open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from latentkv import LatentKVError, Llama, LlamaGrammar

GRAMMAR = 'root ::= "abc"'
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def llm(plain_gguf: Path) -> Llama:
    return Llama(str(plain_gguf), n_ctx=256, seed=1)


REFUSED = [
    {"temperature": "warm"},
    {"top_p": "x"},
    {"repeat_penalty": "1"},
    {"mirostat_mode": "2"},
    {"xtc_probability": "x"},
    {"dry_sequence_breakers": "a"},
    {"dry_sequence_breakers": 5},
    {"logit_bias": [1]},
    {"grammar": 5},
    {"stop": 5},
    {"stop": ["a", 5]},
    {"stop": b"a"},
    {"logprobs": -1},
]


@pytest.mark.parametrize("options", REFUSED, ids=str)
def test_other_types_are_refused_in_one_line(llm: Llama, options: dict[str, Any]) -> None:
    name = next(iter(options))
    with pytest.raises(LatentKVError, match=rf"^\[{name}\] expected .+; got .+"):
        llm.create_completion("a", **options)


@pytest.mark.parametrize(
    "options", [{"response_format": "json"}, {"logprobs": True, "top_logprobs": -1}, {"grammar": 5}], ids=str
)
def test_so_are_those_of_a_chat(llm: Llama, options: dict[str, Any]) -> None:
    with pytest.raises(LatentKVError, match=r"^\[\w+\] expected .+; got .+"):
        llm.create_chat_completion(MESSAGES, **options)


def test_none_is_the_default_of_the_call(llm: Llama) -> None:
    left_open = dict.fromkeys(
        ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "dry_multiplier", "repeat_last_n")
    )
    plain = llm.create_completion("The ", max_tokens=6, seed=7)
    assert llm.create_completion("The ", max_tokens=6, seed=7, **left_open)["choices"] == plain["choices"]
    chat = llm.create_chat_completion(MESSAGES, max_tokens=6, seed=7)
    again = llm.create_chat_completion(MESSAGES, max_tokens=6, seed=7, **left_open)
    assert again["choices"] == chat["choices"]


def test_a_grammar_may_be_its_text(llm: Llama) -> None:
    made = LlamaGrammar.from_string(GRAMMAR)
    for grammar in (GRAMMAR, made):
        assert llm.create_completion("a", grammar=grammar)["choices"][0]["text"] == "abc"
        chat = llm.create_chat_completion(MESSAGES, grammar=grammar)
        assert chat["choices"][0]["message"]["content"] == "abc"


@pytest.mark.parametrize("tokens", [None, "abc", ["a"], [1.0], 5], ids=str)
def test_tokens_are_integers(llm: Llama, tokens: Any) -> None:
    for call in (llm.eval, llm.detokenize, lambda these: next(llm.generate(these))):
        with pytest.raises(LatentKVError, match="expected a list of token ids; got"):
            call(tokens)
    if not isinstance(tokens, str):
        with pytest.raises(LatentKVError, match=r"\[prompt\] expected a list of token ids"):
            llm.create_completion(tokens)


def test_text_is_bytes(llm: Llama) -> None:
    assert llm.tokenize(bytearray(b"hi")) == llm.tokenize(memoryview(b"hi")) == llm.tokenize(b"hi")
    for text in (None, 5, "hi"):
        with pytest.raises(LatentKVError, match=r"^\[tokenize\] expected bytes; got"):
            llm.tokenize(text)  # type: ignore[arg-type]


def test_nothing_is_sampled_of_nothing(llm: Llama) -> None:
    llm.reset()
    with pytest.raises(LatentKVError, match="call eval"):
        llm.sample()


def test_the_constructor_takes_none_for_a_default(plain_gguf: Path) -> None:
    names = ("kv", "kv_k", "kv_sink", "kv_budget", "evict", "keep_tokens", "prefill", "sink", "recent_ratio")
    with Llama(str(plain_gguf), n_ctx=64, **dict.fromkeys(names)) as llm:  # type: ignore[arg-type]
        assert llm.kv_bytes()["total"] == Llama(str(plain_gguf), n_ctx=64).kv_bytes()["total"]


@pytest.mark.parametrize(
    "options",
    [
        {"kv": 5},
        {"evict": 5},
        {"kv_budget": 5},
        {"seed": "a"},
        {"seed": 2**40},
        {"recent_ratio": "x"},
        {"tensor_split": 5},
        {"kv_budget": "200%"},
        {"f16_kv": False},
    ],
    ids=str,
)
def test_the_constructor_refuses_in_one_line(plain_gguf: Path, options: dict[str, Any]) -> None:
    with pytest.raises(LatentKVError, match=r"^\[[\w-]+\] expected .+; got .+"):
        Llama(str(plain_gguf), n_ctx=64, **options)


def test_a_preset_in_capitals_and_old_arguments(plain_gguf: Path) -> None:
    with Llama(str(plain_gguf), n_ctx=64, kv="Small", f16_kv=True, n_gqa=8, kv_overrides={}) as llm:
        assert llm.kv_bytes()["total"] == Llama(str(plain_gguf), n_ctx=64, kv="small").kv_bytes()["total"]
