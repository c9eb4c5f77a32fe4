"""Texts to embed beside answers: both get what they get alone, and an answer does not wait for many texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asking import TEXT, asked, run, scheduler

from latentkv.engine.request import Request, Ticket
from latentkv.engine.scheduler import EMBEDDED_CHUNK, Scheduler
from latentkv.sampling.options import SamplingOptions

TEXTS = ["The clerk of the town wrote numbers into a book.", "A bridge", TEXT[3000:4500]]


@pytest.fixture(scope="module")
def model(converted: Callable[..., Path]) -> Any:
    from latentkv import _core

    return _core.Model(str(converted("--method", "none", "--outtype", "f32")))


def to_embed(model: Any, text: str, pooling: str = "mean") -> Ticket:
    options = SamplingOptions(temperature=0)
    return Ticket(Request(model.tokenize(text.encode()), options, 0, reuses=False, pooling=pooling))


def embedding(ticket: Ticket) -> Any:
    assert ticket.progress.embedding is not None
    return ticket.progress.embedding


@pytest.mark.parametrize("cache", [{}, {"prefill": "lazy"}, {"sink": 4, "recent": 32}], ids=str)
@pytest.mark.parametrize("pooling", ["mean", "last", "cls", "none"])
def test_beside_others_and_alone(model: Any, cache: dict[str, Any], pooling: str) -> None:
    alone = []
    for text in TEXTS:
        ticket = to_embed(model, text, pooling)
        run(scheduler(model, 1, cache=cache), ticket)
        alone.append(embedding(ticket))
    said = run(scheduler(model, 1, cache=cache), asked(model, "The clerk", 40))
    others = [to_embed(model, text, pooling) for text in TEXTS]
    together = scheduler(model, 3, cache=cache)
    assert run(together, asked(model, "The clerk", 40), *others)[0] == said[0]
    for want, got in zip(alone, others, strict=True):
        assert np.allclose(embedding(got), want, atol=1e-4)
    assert len(embedding(others[0])) == (len(others[0].request.prompt) if pooling == "none" else 1)


def test_an_embedding_leaves_no_rows_and_one_conversation_at_most_moves(model: Any) -> None:
    two = scheduler(model, 2)
    talks = ["The clerk of the town wrote numbers. " * 4, "A bridge leads over the river. " * 4]
    for talk in talks:
        run(two, asked(model, talk))
    tickets = [to_embed(model, text) for text in TEXTS * 2]
    run(two, *tickets)
    assert all(ticket.progress.timings.cached_n == 0 for ticket in tickets)
    again = asked(model, talks[1])  # the one that was used last
    run(two, again)
    assert again.progress.timings.cached_n == len(again.request.prompt) - 1
    assert two.session.n_cells_used() == len(again.request.prompt) + again.progress.completion_tokens - 1


def test_a_cancelled_embedding_leaves_nothing(model: Any) -> None:
    one = scheduler(model, 1, n_batch=32)
    ticket = to_embed(model, TEXTS[2])
    one.submit(ticket)
    one.step()
    assert one.session.n_cells_used() == 32
    ticket.cancel()
    assert not one.step()
    assert one.session.n_cells_used() == 0


def test_answers_go_on_while_texts_are_embedded(model: Any) -> None:
    two = scheduler(model, 2, clock=lambda: 0.0)  # the texts never had too much of it
    answer, long = asked(model, "The clerk", 60), to_embed(model, TEXT[:1500])
    two.submit(answer)
    two.step()
    two.submit(long)
    before, steps = answer.progress.completion_tokens, 0
    while long.progress.embedding is None:
        two.step()
        steps += 1
    assert answer.progress.completion_tokens - before == steps >= len(long.request.prompt) // EMBEDDED_CHUNK


def embedded_beside(model: Any, texts: list[str], cache: dict[str, Any]) -> tuple[Scheduler, list[int]]:
    """An engine with an answer and texts in it; how many tokens of texts each step had until the answer was
    there. A token takes a second."""
    four = scheduler(model, 4, 2048, cache=cache, clock=lambda: float(four.counters.step_tokens))
    answer = asked(model, "The clerk", 60)
    for ticket in [*(to_embed(model, text) for text in texts), answer]:
        four.submit(ticket)
    counts = []
    while answer.progress.completion_tokens < 60:
        answered, before = answer.progress.completion_tokens, four.counters.step_tokens
        four.step()
        if answered:
            assert answer.progress.completion_tokens == answered + 1
            counts.append(four.counters.step_tokens - before - 1)
    return four, counts


@pytest.mark.parametrize(("count", "length"), [(152, 40), (20, 1500)])
def test_a_step_of_an_answer_has_few_tokens_to_embed(model: Any, count: int, length: int) -> None:
    """Texts came first, many times as many as there are sequences."""
    texts = [TEXT[at : at + length] for at in range(0, count * 20, 20)]
    four, counts = embedded_beside(model, texts, {})
    assert len(counts) == 59
    assert max(counts) <= EMBEDDED_CHUNK
    assert 28 <= sum(counts) <= 59 + EMBEDDED_CHUNK  # half of the time
    while four.step():
        pass
    assert four.counters.requests == count + 1


def test_a_text_that_is_embedded_whole_lets_answers_catch_up(model: Any) -> None:
    texts = [TEXT[at : at + 1500] for at in range(0, 400, 20)]
    _, counts = embedded_beside(model, texts, {"prefill": "lazy"})
    assert sum(map(bool, counts)) <= 1


def test_alone_texts_fill_a_step(model: Any) -> None:
    four = scheduler(model, 4, 4096, n_batch=512)
    for at in range(4):
        four.submit(to_embed(model, TEXT[at : at + 3000]))
    four.step()
    assert four.counters.step_tokens == 512
