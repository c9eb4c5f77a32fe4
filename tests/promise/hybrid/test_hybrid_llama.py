"""`Llama` on a model with recurrent layers: what is cached is used as far as snapshots reach, and answers are
those of an empty cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hybrid_files import Hybrid, write
from runtime import distance

from latentkv import Llama, LlamaRAMCache
from latentkv.plan.fit import MARGIN, on_card
from latentkv.plan.options import SessionOptions
from latentkv.sampling.speculative import LlamaPromptLookupDecoding

TEXT = b"the cat sat on the mat and the dog sat on the log and the cat sat on the dog. " * 3


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    pytest.importorskip("torch")
    return write(tmp_path_factory.mktemp("hybrid") / "model.gguf")


def opened(hybrid: Hybrid, **options: Any) -> Llama:
    return Llama(str(hybrid.path), **{"n_ctx": 1024, "kv": "f32", "n_threads": 1, "verbose": False} | options)


def greedy(llama: Llama, prompt: list[int], n: int = 24) -> list[int]:
    return [token for token, _ in zip(llama.generate(prompt, temp=0.0), range(n), strict=False)]


def test_greedy_tokens_are_those_of_transformers(hybrid: Hybrid) -> None:
    llama = opened(hybrid)
    prompt = llama.tokenize(TEXT)
    expected = list(prompt)
    for _ in range(8):
        expected.append(int(np.argmax(hybrid.logits(expected)[-1])))
    assert greedy(llama, prompt, 8) == expected[len(prompt) :]


def test_a_prompt_goes_on_from_a_snapshot(hybrid: Hybrid) -> None:
    llama = opened(hybrid)
    first = llama.tokenize(TEXT)
    answer = greedy(llama, first)
    others = {
        len(first): [*first, 11, 12, 13],  # another answer
        len(first) - 16: [*first[:-3], 1, 2, 3, 4],  # another end of the prompt
        0: first[:100] + [5] * 20,
    }
    for kept, prompt in others.items():
        assert greedy(llama, first) == answer
        assert llama.evaluator.reuse_prefix(prompt) == kept
        assert greedy(llama, prompt) == greedy(opened(hybrid), prompt)
    # all of it, with its answer
    assert greedy(llama, first) == answer
    longer = [*llama.evaluator.eval_tokens, 3, 4]
    assert llama.evaluator.reuse_prefix(longer) == len(longer) - 2
    assert greedy(llama, longer) == greedy(opened(hybrid), longer)


def test_guesses_do_not_change_an_answer(hybrid: Hybrid) -> None:
    plain, guessing = opened(hybrid), opened(hybrid, draft_model=LlamaPromptLookupDecoding(2, 6))
    state = plain.kv_bytes()["states"] // 2
    assert guessing.kv_bytes()["states"] == (2 + 6) * state
    wrong = opened(hybrid, draft_model=lambda ids: np.full(5, 3, np.intc))
    for text in (TEXT, b"a", TEXT[:50]):
        prompt = plain.tokenize(text)
        expected = greedy(plain, prompt, 60)
        assert greedy(guessing, prompt, 60) == expected
        assert greedy(wrong, prompt, 60) == expected


def test_a_cut_cache_goes_on(hybrid: Hybrid) -> None:
    llama = opened(hybrid)
    prompt = llama.tokenize(TEXT)
    llama.eval(prompt)
    llama.n_tokens = 150
    llama.eval([1, 2, 3])
    assert distance(llama.evaluator.logits, hybrid.logits([*prompt[:150], 1, 2, 3])[-1]) < 1e-4


def test_streams_that_take_turns(hybrid: Hybrid) -> None:
    llama = opened(hybrid)
    prompts = [llama.tokenize(TEXT[:60]), llama.tokenize(TEXT[20:90])]
    expected = [greedy(opened(hybrid), prompt, 12) for prompt in prompts]
    streams = [llama.generate(prompt, temp=0.0) for prompt in prompts]
    got: list[list[int]] = [[], []]
    for _ in range(12):
        for stream, tokens in zip(streams, got, strict=True):
            tokens.append(next(stream))
    assert got == expected


def test_states_and_caches(hybrid: Hybrid, tmp_path: Path) -> None:
    llama = opened(hybrid)
    prompt = llama.tokenize(TEXT)
    llama.eval(prompt)
    state = llama.save_state()
    expected = greedy(llama, prompt)
    other = opened(hybrid, kv="f16")
    other.load_state(state)
    assert other.n_tokens == len(prompt)
    assert distance(other.evaluator.logits, llama.evaluator.logits) >= 0
    caching = opened(hybrid)
    caching.set_cache(LlamaRAMCache())
    text = TEXT.decode()
    answer = caching.create_completion(text, max_tokens=8, temperature=0.0)["choices"][0]["text"]
    caching.create_completion("another prompt " * 10, max_tokens=4, temperature=0.0)
    again = caching.create_completion(text, max_tokens=8, temperature=0.0)["choices"][0]["text"]
    assert again == answer
    assert greedy(opened(hybrid), prompt) == expected


def test_a_conversation(hybrid: Hybrid) -> None:
    llama = opened(hybrid)
    messages = [
        {"role": "user", "content": "Tell me of the cat that sat on the mat, and of the dog on the log."}
    ]
    for turn in range(3):
        given = {"max_tokens": 10, "temperature": 0.0}
        got = llama.create_chat_completion(messages, **given)["choices"][0]["message"]["content"]
        alone = opened(hybrid).create_chat_completion(messages, **given)["choices"][0]["message"]["content"]
        assert got == alone
        messages += [
            {"role": "assistant", "content": "It did."},
            {"role": "user", "content": f"More {turn}?"},
        ]


def test_bytes_are_shown_by_their_names(hybrid: Hybrid, capsys: pytest.CaptureFixture[str]) -> None:
    from latentkv.cli import main

    assert main(["info", str(hybrid.path), "-c", "1024"]) == 0
    shown = capsys.readouterr().out
    assert "1 of 4 layers attend, 3 are recurrent" in shown
    assert "of recurrent layers' states" in shown
    assert "beside it the host keeps up to" in shown
    assert [line.split()[0] for line in shown.splitlines()[-4:]] == ["16.0", "16.0", "24.0", "24.0"]


def test_what_a_card_holds(hybrid: Hybrid) -> None:
    options = SessionOptions(kv="f16")
    whole = on_card(str(hybrid.path), "", options, 16 << 30)
    assert (whole.n_ctx, whole.rows) == (4096, 4096 * (256 + 12))
    short = on_card(str(hybrid.path), "", SessionOptions(kv="f16", n_ubatch=512), 16 << 30)
    assert short.compute < whole.compute  # long ubatches take what is left
    least = MARGIN + short.weights + short.states + short.compute
    part = on_card(str(hybrid.path), "", options, least + 2048 * 300)
    assert 1024 < part.n_ctx < 4096
    assert part.compute == short.compute
    assert part.states == whole.states
    assert on_card(str(hybrid.path), "", options, MARGIN + 1).n_ctx == 0
