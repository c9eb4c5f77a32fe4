"""Calls and classes that llama-cpp-python has beside the completions."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import latentkv
from latentkv import (
    LatentKVError,
    LlamaDiskCache,
    LlamaPromptLookupDecoding,
    LlamaRAMCache,
    LlamaState,
    LogitsProcessorList,
    MinTokensLogitsProcessor,
)

Build = Callable[..., Any]

# Repeats itself, as what prompt lookup is for does.
PROMPT = "The clerk keeps the ledger. The clerk keeps the ledger. The clerk keeps the"


def build(path: Path, **options: Any) -> Any:
    from latentkv import Llama

    return Llama(str(path), **({"n_ctx": 256, "n_threads": 1, "kv": "f16"} | options))


@pytest.fixture(scope="module")
def plain(latent_gguf: Path) -> Iterator[Any]:
    with build(latent_gguf) as llama:
        yield llama


def test_min_tokens(scripted: Build, script: Any) -> None:
    script.say(2, b"a")
    at_least = LogitsProcessorList([MinTokensLogitsProcessor(3, 0)])
    out = scripted()("xy", max_tokens=8, logits_processor=at_least)
    assert out["usage"]["completion_tokens"] == 3
    assert scripted()("xy", max_tokens=8)["usage"]["completion_tokens"] == 1


def test_openai_objects(scripted: Build, script: Any) -> None:
    pytest.importorskip("openai")
    llm = scripted(chat_format="chatml")
    ask = [{"role": "user", "content": "Hi"}]
    script.say(len(llm.chat_template.render(ask)), b"Yes", b".")
    answer = llm.create_chat_completion_openai_v1(ask)
    assert answer.choices[0].message.content == "Yes."
    assert answer.usage.completion_tokens == 2
    chunks = llm.create_chat_completion_openai_v1(ask, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Yes."


def test_openai_is_asked_for_by_name(scripted: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai.types.chat", None)
    with pytest.raises(LatentKVError, match=r"\[openai\] expected the package openai; got none; pip install"):
        scripted(chat_format="chatml").create_chat_completion_openai_v1([{"role": "user", "content": "Hi"}])


def test_infill(scripted: Build, script: Any) -> None:
    script.infill = (390, 391, 392)
    script.say(8, b"mid")
    llm = scripted()
    out = llm("ab", suffix="cde", max_tokens=4)
    assert out["choices"][0]["text"] == "mid"
    a, b, c, d, e = (ord(letter) + 1 for letter in "abcde")
    assert llm.eval_tokens[:8] == [390, a, b, 391, c, d, e, 392]
    assert out["usage"]["prompt_tokens"] == 8
    suffix_first = scripted(spm_infill=True)
    assert suffix_first("ab", suffix="cde", max_tokens=4)["choices"][0]["text"] == "mid"
    assert suffix_first.eval_tokens[:8] == [391, c, d, e, 390, a, b, 392]


def test_lookup_guesses_what_followed_the_last_time() -> None:
    guess = LlamaPromptLookupDecoding(max_ngram_size=2, num_pred_tokens=3)
    assert guess(np.array([1, 2, 3, 4, 5, 1, 2], np.intc)).tolist() == [3, 4, 5]
    assert guess(np.array([1, 2, 9, 1, 2, 3, 1, 2], np.intc)).tolist() == [3, 1, 2]
    assert guess(np.array([7, 2, 9, 1, 2], np.intc)).tolist() == [9, 1, 2]  # of one token
    assert guess(np.array([1, 2, 3], np.intc)).tolist() == []
    assert guess(np.array([1], np.intc)).tolist() == []
    with pytest.raises(LatentKVError, match=r"\[num_pred_tokens\]"):
        LlamaPromptLookupDecoding(num_pred_tokens=0)


class Wrong:
    """Guesses what never comes."""

    def __call__(self, input_ids: np.ndarray, **options: Any) -> np.ndarray:
        return np.array([3, 3, 3], np.intc)


@pytest.mark.parametrize("guess", [LlamaPromptLookupDecoding(num_pred_tokens=6), Wrong()])
def test_guesses_change_no_answer(latent_gguf: Path, plain: Any, guess: Any) -> None:
    options = {"max_tokens": 40, "temperature": 0, "logprobs": 1, "stop": ["\n\n"]}
    plain.reset()
    wanted = plain(PROMPT, **options)["choices"][0]
    with build(latent_gguf, draft_model=guess) as llm:
        got = llm(PROMPT, **options)["choices"][0]
        assert got["text"] == wanted["text"]
        assert got["finish_reason"] == wanted["finish_reason"]
        assert got["logprobs"]["token_logprobs"] == pytest.approx(
            wanted["logprobs"]["token_logprobs"], abs=5e-2
        )
        assert llm.eval_tokens == plain.eval_tokens  # no guess is left behind
        assert llm.session.seq_pos_max(0) + 1 == llm.n_tokens
        chunks = list(llm(PROMPT, stream=True, **options))
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == wanted["text"]


def test_guesses_save_calls(latent_gguf: Path) -> None:
    calls: dict[bool, int] = {}
    for guessing in (False, True):
        guess = LlamaPromptLookupDecoding(num_pred_tokens=8) if guessing else None
        with build(latent_gguf, draft_model=guess) as llm:
            decode, count = llm.evaluator._decode, [0]

            def counted(*args: Any, decode: Any = decode, count: list[int] = count, **options: Any) -> Any:
                count[0] += 1
                return decode(*args, **options)

            llm.evaluator._decode = counted
            # every second line of the text again: the model is made to quote
            quote = iter(llm.tokenize(PROMPT.encode(), add_bos=False) * 2)

            def say(ids: np.ndarray, logits: np.ndarray, quote: Any = quote) -> np.ndarray:
                logits[next(quote)] = 99
                return logits

            llm(PROMPT, max_tokens=30, temperature=0, logits_processor=say)
            calls[guessing] = count[0]
    assert calls[False] == 30  # the prompt, and every token but the last
    assert calls[True] < 15


def test_guesses_and_generate(latent_gguf: Path, plain: Any) -> None:
    tokens = plain.tokenize(PROMPT.encode())
    plain.reset()
    wanted = [token for _, token in zip(range(20), plain.generate(tokens, temp=0), strict=False)]
    with build(latent_gguf, draft_model=LlamaPromptLookupDecoding(), logits_all=True) as llm:
        stream = llm.generate(tokens, temp=0)
        assert [next(stream) for _ in range(20)] == wanted
        stream.close()
        assert llm.eval_tokens == [*tokens, *wanted[:-1]]
        row = llm.scores[len(tokens)]
        assert int(row.argmax()) == wanted[1]


def test_tokens_sent_behind_a_right_guess(latent_gguf: Path, plain: Any) -> None:
    tokens, own = plain.tokenize(PROMPT.encode()), [11, 12, 13]
    plain.reset()
    wanted = [token for _, token in zip(range(8), plain.generate(tokens, temp=0), strict=False)]
    with build(
        latent_gguf, draft_model=lambda ids: np.array(wanted[len(ids) - len(tokens) :], np.intc)
    ) as llm:
        stream = llm.generate(tokens, temp=0)
        assert [next(stream), next(stream)] == wanted[:2]
        stream.send(own)
        stream.close()
        assert llm.eval_tokens == [*tokens, *wanted[:2], *own]


WINDOW = {"kv": "q2", "kv_recent": "f16", "sink": 4, "recent": 40}


def said(llm: Any, n: int) -> tuple[str, list[float]]:
    """A long answer that never ends of itself, and what its tokens scored."""
    bias = {llm.token_eos(): -100.0}
    choice = llm(PROMPT, max_tokens=n, temperature=0, logprobs=1, logit_bias=bias)["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def test_guesses_push_no_exact_token_out(latent_gguf: Path) -> None:
    """Wrong ones, each step, with rows of 2 bits behind the window: the numbers are those without guesses, at
    which tokens leave the window at the same steps."""
    with build(latent_gguf, **WINDOW) as plain, build(latent_gguf, draft_model=Wrong(), **WINDOW) as llm:
        text, logprobs = said(plain, 120)
        got, others = said(llm, 120)
        assert got == text
        assert others == pytest.approx(logprobs, abs=3e-2)  # a batch of four sums in another order
        regions = [{r["name"]: r["used"] for r in each.kv_bytes()["regions"]} for each in (plain, llm)]
        assert regions[0] == regions[1]
        assert regions[0]["middle"] > 60
        decode = llm.evaluator._decode
        llm.evaluator._decode = lambda batch, output, n_guesses=0: decode(
            batch, output
        )  # guesses that count as tokens
        llm.reset()
        worn = said(llm, 120)[1]
        assert max(abs(a - b) for a, b in zip(worn, logprobs, strict=True)) > 0.06


def test_right_guesses_with_an_exact_window(latent_gguf: Path) -> None:
    """What is quoted needs fewer calls, in a file with exact tokens too, and no token is lost on the way."""
    with build(latent_gguf, draft_model=LlamaPromptLookupDecoding(num_pred_tokens=8), **WINDOW) as llm:
        decode, count = llm.evaluator._decode, [0]

        def counted(*args: Any, **options: Any) -> Any:
            count[0] += 1
            return decode(*args, **options)

        llm.evaluator._decode = counted
        quote = iter(llm.tokenize(PROMPT.encode(), add_bos=False) * 9)

        def say(ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
            logits[next(quote)] = 99
            return logits

        llm(PROMPT, max_tokens=150, temperature=0, logits_processor=say)
        assert count[0] < 50
        regions = {r["name"]: r["used"] for r in llm.kv_bytes()["regions"]}
        assert sum(regions.values()) == llm.n_tokens == llm.session.seq_pos_max(0) + 1
        assert regions["recent"] >= WINDOW["recent"]
        assert regions["middle"] > 60


def test_guesses_are_the_last_tokens_of_their_sequences(latent_gguf: Path) -> None:
    with build(latent_gguf, n_seq_max=2) as llm:
        llm.session.decode([1, 2, 3, 4], seq=[0, 1, 0, 1], guessed=[False, False, True, True])
        for guessed, seq in (([True, False], [0, 0]), ([False, True, True], [0, 0]), ([True], [0, 0])):
            with pytest.raises(ValueError, match=r"^\[decode\] expected .*guesses"):
                llm.session.decode([1, 2], seq=seq, guessed=guessed)


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_cache_keeps_other_calls(plain: Any, tmp_path: Path, kind: str) -> None:
    cache = LlamaRAMCache() if kind == "memory" else LlamaDiskCache(str(tmp_path / "states"))
    plain.reset()
    plain.set_cache(cache)
    try:
        first = plain(PROMPT, max_tokens=8, temperature=0)
        plain("Something else entirely, of which nothing is shared.", max_tokens=4, temperature=0)
        again = plain(PROMPT, max_tokens=8, temperature=0)
        assert plain.timings.cached_n >= len(plain.tokenize(PROMPT.encode())) - 1
        assert again["choices"] == first["choices"]
        assert cache.cache_size > 0
        assert plain.tokenize(PROMPT.encode()) in cache
        assert [] not in cache
        with pytest.raises(KeyError):
            cache[[8191]]
    finally:
        plain.set_cache(None)
    plain("Something else entirely.", max_tokens=1)
    plain(PROMPT, max_tokens=1)
    assert plain.timings.cached_n < 3


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_cache_forgets_what_was_longest_unused(plain: Any, tmp_path: Path, kind: str) -> None:
    plain.reset()
    plain.eval(plain.tokenize(PROMPT.encode()))
    state = plain.save_state()
    room = 2 * state.llama_state_size + 2000
    cache: Any = LlamaRAMCache(room) if kind == "memory" else LlamaDiskCache(str(tmp_path / "states"), room)
    for first in (1, 2):
        state.input_ids = [first, 5, 6]
        cache[[first, 5, 6]] = state
    assert cache[[1, 5]].n_tokens == 3  # used
    state.input_ids = [3, 5, 6]
    cache[[3, 5, 6]] = state
    assert [1] in cache
    assert [2] not in cache
    assert [3] in cache
    assert cache.cache_size <= room


def test_a_directory_with_other_files(tmp_path: Path) -> None:
    (tmp_path / "x.lkv").write_bytes(b"other")
    with pytest.raises(LatentKVError, match=r"\[state\] expected a file written by save_state"):
        _ = [1] in LlamaDiskCache(str(tmp_path))


def test_pickling_keeps_the_arguments(latent_gguf: Path) -> None:
    with build(latent_gguf, n_ctx=64, kv="q4", chat_format="chatml", flash_attn=True) as llm:
        llm.set_seed(11)
        wanted = llm(PROMPT, max_tokens=8)["choices"]
        data = pickle.dumps(llm)
    with pickle.loads(data) as copy:
        assert copy.n_ctx() == 64
        assert copy.seed == 11
        assert "im_start" in copy.chat_template.source
        assert copy(PROMPT, max_tokens=8)["choices"] == wanted


def test_pickles_name_public_classes() -> None:
    """What was pickled is found again, wherever its class has moved to."""
    state = LlamaState([1, 2], b"rows", np.zeros(3, np.float32), 7)
    copy = pickle.loads(pickle.dumps(state))
    assert (copy.input_ids, copy.cache, copy.seed) == ([1, 2], b"rows", 7)
    named = [getattr(latentkv, name) for name in latentkv.__all__]
    classes = [each for each in named if isinstance(each, type)]
    assert len(classes) > 10
    assert {each.__module__ for each in classes} == {"latentkv"}
    assert all(pickle.loads(pickle.dumps(each)) is each for each in classes)
