"""A prompt that is scored (echo with logprobs) never has all of its logits in memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asking import GREEDY, TEXT, scheduler

from latentkv.engine.request import Request, Ticket
from latentkv.sampling.logprobs import log_softmax

PREFILLS = pytest.mark.parametrize("prefill", ["eager", "lazy"])


@pytest.fixture(scope="module")
def model(converted: Callable[..., Path]) -> Any:
    from latentkv import _core

    return _core.Model(str(converted("--method", "none", "--outtype", "f32")))


def scored(prompt: list[int]) -> Ticket:
    return Ticket(Request(prompt, GREEDY, 0, logprobs=1, scores_prompt=True))


@PREFILLS
def test_memory_does_not_grow_with_a_scored_prompt(model: Any, prefill: str) -> None:
    prompt = (model.tokenize(TEXT.encode()) * 9)[:8000]
    only = scheduler(model, 1, 8192, cache={"prefill": prefill})
    ticket = scored(prompt)
    only.submit(ticket)
    tracemalloc.start()
    try:
        while only.step():
            pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    (piece,) = ticket
    assert len(piece.tokens) == len(prompt)
    assert peak < len(prompt) * model.n_vocab * 4 / 8


@PREFILLS
def test_scores_are_those_of_one_call(model: Any, prefill: str) -> None:
    prompt = model.tokenize(TEXT.encode())[:700]  # more than a ubatch
    cache = {"prefill": prefill, "kv": "q4"}
    session = scheduler(model, 1, cache=cache).session
    logits = session.decode(prompt, output="all")
    if prefill == "eager":  # what later tokens see is stored after each ubatch
        session.clear()
        parts = [prompt[at : at + 128] for at in range(0, len(prompt), 128)]
        logits = np.concatenate([session.decode(part, output="all") for part in parts])
    want = [float(row[token]) for row, token in zip(log_softmax(logits[:-1]), prompt[1:], strict=True)]
    only = scheduler(model, 1, cache=cache)
    ticket = scored(prompt)
    only.submit(ticket)
    while only.step():
        pass
    (piece,) = ticket
    got = [score.logprob for score in piece.tokens]
    assert got[0] is None
    assert got[1:] == pytest.approx(want, abs=1e-6)
    assert piece.text == model.detokenize(prompt, True).decode()


def test_many_scored_prompts_share_a_step(model: Any) -> None:
    many = scheduler(model, 8, 4096)
    prompts = [model.tokenize(TEXT[at : at + 900].encode()) for at in range(0, 8000, 1000)]
    tickets = [scored(prompt) for prompt in prompts]
    for ticket in tickets:
        many.submit(ticket)
    most = 0
    decode = many.session.decode

    class Seen:
        def __getattr__(self, name: str) -> Any:
            return getattr(session, name)

        def decode(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal most
            logits = decode(*args, **kwargs)
            most = max(most, len(logits))
            return logits

    session, seen = many.session, Seen()
    many.session = seen
    while many.step():
        pass
    assert 0 < most <= 128
    for ticket, prompt in zip(tickets, prompts, strict=True):
        (piece,) = ticket
        assert len(piece.tokens) == len(prompt)
