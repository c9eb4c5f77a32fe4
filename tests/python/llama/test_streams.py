"""A stream goes on whatever other calls come between its steps: interleaved, as computed alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PROMPTS = ["The clerk of the court", "A cache is", "The clerk of the ship had"]
FORMATS = {"plain": {}, "latent": {"kv": "q4"}, "latent with windows": {"kv": "q4", "sink": 4, "recent": 40}}


@pytest.fixture(scope="module", params=FORMATS)
def llm(request: pytest.FixtureRequest) -> Iterator[Any]:
    from latentkv import Llama

    name = "plain_gguf" if request.param == "plain" else "latent_gguf"
    path = request.getfixturevalue(name)
    with Llama(str(path), n_ctx=192, n_threads=1, **FORMATS[request.param]) as llama:
        yield llama


def options(llm: Any) -> dict[str, Any]:
    return {"max_tokens": 100, "seed": 7, "logprobs": 1, "logit_bias": {llm.token_eos(): -100.0}}


def streamed(llm: Any, prompt: str) -> Iterator[Any]:
    return iter(llm(prompt, **options(llm), stream=True))


def added_up(chunks: list[Any]) -> tuple[str, list[float]]:
    """Text and log-probabilities: equal numbers, not only equal tokens."""
    choices = [chunk["choices"][0] for chunk in chunks]
    logprobs = [p for choice in choices for p in choice["logprobs"]["token_logprobs"]]
    return "".join(choice["text"] for choice in choices), logprobs


def alone(llm: Any, prompt: str) -> tuple[str, list[float]]:
    llm.reset()
    return added_up(list(streamed(llm, prompt)))


def test_calls_in_the_loop_of_a_stream(llm: Any) -> None:
    wanted, other = alone(llm, PROMPTS[0]), alone(llm, PROMPTS[1])
    llm.reset()
    chunks = []
    for i, chunk in enumerate(streamed(llm, PROMPTS[0])):
        chunks.append(chunk)
        if i % 20 == 3:
            llm.reset()
            assert added_up(list(streamed(llm, PROMPTS[1]))) == other
    assert len(chunks) > 30
    assert added_up(chunks) == wanted


def test_streams_side_by_side(llm: Any) -> None:
    """Together they have more tokens than the context."""
    wanted = [alone(llm, prompt) for prompt in PROMPTS]
    llm.reset()
    chunks: list[list[Any]] = [[] for _ in PROMPTS]
    for step in itertools.zip_longest(*(streamed(llm, prompt) for prompt in PROMPTS)):
        for kept, chunk in zip(chunks, step, strict=True):
            kept += [chunk] if chunk is not None else []
    texts = [added_up(kept) for kept in chunks]
    assert texts[0] == wanted[0]
    # the others may have begun with a prefix that is cached, as any call may
    assert [text for text, _ in texts] == [text for text, _ in wanted]


def test_what_else_a_loop_may_do(llm: Any) -> None:
    """A chat, tokens of one's own, a state that is loaded, the cache emptied: the stream's rows wait."""
    wanted = alone(llm, PROMPTS[0])
    llm.reset()
    state = llm.save_state()
    tokens = llm.tokenize(PROMPTS[2].encode())
    between: list[Callable[[], Any]] = [
        lambda: llm.create_chat_completion([{"role": "user", "content": "Hi"}], max_tokens=4),
        lambda: llm.eval(tokens),
        lambda: llm.load_state(state),
        llm.reset,
        lambda: list(itertools.islice(llm.generate(tokens, temp=0), 5)),
        lambda: setattr(llm, "n_tokens", 0),
        lambda: next(streamed(llm, PROMPTS[1])),  # and is abandoned
    ]
    chunks = []
    for call, chunk in itertools.zip_longest(between, streamed(llm, PROMPTS[0])):
        chunks.append(chunk)
        if call is not None:
            call()
    assert added_up(chunks) == wanted


def test_a_stream_that_is_over_leaves_nothing_behind(llm: Any) -> None:
    first, second = streamed(llm, PROMPTS[0]), streamed(llm, PROMPTS[1])
    next(first), next(second)
    list(second)
    first.close()  # type: ignore[attr-defined]
    assert not llm.evaluator._set_aside
    assert llm.evaluator.is_held_by(None)
    third = streamed(llm, PROMPTS[2])
    next(third)
    assert llm.eval_tokens[: len(llm.tokenize(PROMPTS[2].encode()))] == llm.tokenize(PROMPTS[2].encode())


def test_generators_side_by_side(llm: Any) -> None:
    tokens = [llm.tokenize(prompt.encode()) for prompt in PROMPTS[:2]]
    wanted = []
    for ids in tokens:
        llm.reset()
        wanted.append(list(itertools.islice(llm.generate(ids, temp=0), 40)))
    llm.reset()
    pairs = zip(*(llm.generate(ids, temp=0) for ids in tokens), strict=True)
    assert [list(column) for column in zip(*itertools.islice(pairs, 40), strict=True)] == wanted


def test_calls_from_inside_of_a_call(llm: Any) -> None:
    wanted = alone(llm, PROMPTS[0])
    calls = []

    def asks(ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
        if len(calls) < 3:
            calls.append(llm(PROMPTS[1], max_tokens=2))
        return logits

    def stops(ids: np.ndarray, logits: np.ndarray) -> bool:
        asks(ids, logits)
        return False

    for callback in ({"logits_processor": asks}, {"stopping_criteria": stops}):
        calls.clear()
        llm.reset()
        out = llm(PROMPTS[0], **options(llm), **callback)
        assert len(calls) == 3
        assert added_up([out]) == wanted


def test_rows_are_in_memory_only_while_they_wait(latent_gguf: Path) -> None:
    from latentkv import Llama

    with Llama(str(latent_gguf), n_ctx=192, n_threads=1, logits_all=True) as llama:
        generator = llama.generate(llama.tokenize(b"The clerk"), temp=0)
        for _ in range(4):
            next(generator)
        scores, ids = llama.scores.copy(), llama.eval_tokens
        llama("A cache is", max_tokens=3)
        assert len(llama.evaluator._set_aside) == 1
        next(generator)
        assert not llama.evaluator._set_aside
        assert llama.eval_tokens[:-1] == ids
        assert np.array_equal(llama.scores[:-1], scores)
