"""Requests of different salts share no beginning, wherever one is kept: in the cache, with a request that
runs, in memory, in files, moved, or in what is remembered of answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from asking import GREEDY, TEXT, asked, run, scheduler

from latentkv.chat.memory import AnswerMemory
from latentkv.chat.prompt import chat_request
from latentkv.chat.template import ChatTemplate
from latentkv.engine.request import Request, Ticket
from latentkv.engine.reuse import Reuse
from latentkv.engine.scheduler import Scheduler
from latentkv.engine.store import PrefixStore
from latentkv.errors import LatentKVError

FIRST, OTHER = TEXT[1000:1800], TEXT[5000:5900]
MORE = FIRST + TEXT[1800:1830]


@pytest.fixture(scope="module")
def model(converted: Callable[..., Path]) -> Any:
    from latentkv import _core

    return _core.Model(str(converted("--method", "none", "--outtype", "f32")))


def cached(served: Scheduler, ticket: Ticket) -> tuple[int, str]:
    said = run(served, ticket)[0]
    return ticket.progress.timings.cached_n, said


def test_an_idle_sequence_is_gone_on_with_by_its_own_alone(model: Any) -> None:
    served = scheduler(model, 3)
    run(served, asked(model, FIRST, salt="a"))
    alone = run(scheduler(model, 1), asked(model, MORE))[0]
    for salt in ("b", ""):
        assert cached(served, asked(model, MORE, salt=salt)) == (0, alone)
    assert cached(served, asked(model, MORE, salt="a"))[0] > 100
    assert cached(served, asked(model, MORE + " He", salt="b"))[0] > 100


@pytest.mark.parametrize(("salt", "shares"), [("a", True), ("b", False), ("", False)])
def test_a_running_request_lends_to_its_own_alone(model: Any, salt: str, shares: bool) -> None:
    two = scheduler(model, 2)
    first, second = asked(model, FIRST, 40, salt="a"), asked(model, MORE, salt=salt)
    for ticket in (first, second):  # the second waits for the first to be read, or starts beside it
        two.submit(ticket)
        two.step()
    assert (second.progress.slot >= 0) is not shares or second.progress.timings.cached_n > 64
    while two.step():
        pass
    assert (second.progress.timings.cached_n > 0) is shares
    n_prompts = len(first.request.prompt) + len(second.request.prompt)
    assert (two.counters.prompt_tokens < 0.7 * n_prompts) is shares


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_kept_sequence_comes_back_to_its_own_alone(model: Any, on_disk: bool, tmp_path: Path) -> None:
    folder, ram = (tmp_path, 0) if on_disk else (None, 64 << 20)
    store = PrefixStore("m", ram, folder, 64 << 20)
    served = scheduler(model, 1, store=store)
    run(served, asked(model, FIRST, salt="a"))
    run(served, asked(model, OTHER, salt="b"))
    assert len(store) == 1
    assert cached(served, asked(model, MORE, salt="b"))[0] == 0
    assert cached(served, asked(model, MORE))[0] == 0
    assert cached(served, asked(model, MORE, salt="a"))[0] > 100
    assert served.counters.restored_tokens > 100
    served.close(LatentKVError("stopped"))
    if on_disk:
        again = scheduler(model, 1, store=PrefixStore("m", ram, folder, 64 << 20))
        assert cached(again, asked(model, FIRST + OTHER[:9], salt="c"))[0] == 0
        assert cached(again, asked(model, MORE, salt="a"))[0] > 100


def test_the_same_text_is_kept_once_for_each(tmp_path: Path) -> None:
    """Pieces that sequences of one salt share, too: a file that is there already would say so by its time."""
    store = PrefixStore("m", 0, tmp_path, 1 << 20)
    tokens, asked_for = list(range(600)), []

    def rows(cuts: Any) -> list[bytes]:
        asked_for.append(list(cuts))
        return [b"x" * 10] * len(cuts)

    for salt in ("", "a", "b"):
        store.put(tokens, rows, 600, salt)
    store.put([*tokens, 1], rows, 600, "a")
    assert asked_for == [[0, 256, 512]] * 3 + [[512]]
    assert len(store) == 3
    assert len({path.name for path in tmp_path.rglob("*.rows")}) == 6
    assert [store.best(len, salt)[1] for salt in ("", "a", "b", "c")] == [600, 601, 600, 0]


def test_chunks_further_on_are_moved_for_their_own_alone(converted: Callable[..., Path]) -> None:
    from latentkv import _core

    model = _core.Model(str(converted("--method", "eigen", "--keep", "0.75")))
    whole = model.tokenize(FIRST.encode())
    cut = [*whole[:10], *whole[60:]]

    def moved(salt: str) -> int:
        served = scheduler(model, 1, reuse=Reuse(16))
        run(served, Ticket(Request(whole, GREEDY, 2, salt="a")))
        return cached(served, Ticket(Request(cut, GREEDY, 2, salt=salt)))[0]

    assert [moved(salt) > 100 for salt in ("a", "b", "")] == [True, False, False]


def test_answers_are_remembered_for_their_own_alone(model: Any) -> None:
    memory, template = AnswerMemory(), ChatTemplate(model=model)
    asks = [{"role": "user", "content": "Numbers?"}]
    prompt = chat_request(model, template, asks, memory=memory, salt="a")
    # as a model may write it, and no tokenizer: letter by letter
    written = [model.find_token(letter) for letter in "abc"]
    message = {"role": "assistant", "content": "abc"}
    assert prompt.remember is not None
    prompt.remember(message, written, None)
    on = [*asks, message, {"role": "user", "content": "More?"}]
    found = {s: chat_request(model, template, on, memory=memory, salt=s).tokens for s in ("", "a", "b")}
    plain = chat_request(model, template, on).tokens
    assert found["a"][: len(prompt.tokens) + 3] == [*prompt.tokens, *written]
    assert found["a"] != plain
    assert found[""] == found["b"] == plain
