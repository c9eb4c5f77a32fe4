"""--cache-reuse: what stands further on in a sequence is moved, as llama.cpp's server moves it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asking import GREEDY, TEXT, run, scheduler

from latentkv.engine.request import Request, Ticket
from latentkv.engine.reuse import Move, Reuse
from latentkv.errors import LatentKVError
from latentkv.sampling.logprobs import log_softmax
from latentkv.session.prefix import common


@pytest.fixture(scope="module")
def plain(converted: Callable[..., Path]) -> Any:
    from latentkv import _core

    return _core.Model(str(converted("--method", "none", "--outtype", "f32")))


@pytest.fixture(scope="module")
def model(converted: Callable[..., Path]) -> Any:
    from latentkv import _core

    return _core.Model(str(converted("--method", "eigen", "--keep", "0.75")))


def one_by_one(cached: Sequence[int], prompt: Sequence[int], start: int, least: int) -> list[Move]:
    """What llama.cpp's server finds, token by token. Its last token is left out: it is computed anyway."""
    found, at, to = [], start, start
    while at < len(cached) and to < len(prompt) - 1:
        count = 0
        while (
            at + count < len(cached)
            and to + count < len(prompt) - 1
            and cached[at + count] == prompt[to + count]
        ):
            count += 1
        if count >= least:
            found.append(Move(at, to, count))
            at, to = at + count, to + count
        else:
            at += 1
    return found


def test_chunks_are_those_that_llama_cpp_finds() -> None:
    rng = random.Random(1)
    n_found = 0
    for _ in range(3000):
        cached = [rng.choice((1, 2, 258, 1 << 16)) for _ in range(rng.randint(0, 40))]
        prompt = list(cached)
        for _ in range(rng.randint(0, 3)):
            at = rng.randint(0, len(prompt))
            prompt[at : at + rng.randint(0, 8)] = [rng.choice((1, 2, 3)) for _ in range(rng.randint(0, 3))]
        prompt = prompt or [1]
        start, least = min(common(cached, prompt), len(prompt) - 1), rng.randint(1, 6)
        found = Reuse(least).moves(cached, prompt, start)
        assert found == one_by_one(cached, prompt, start, least)
        n_found += len(found)
    assert n_found > 500


def test_what_may_not_move_stays() -> None:
    cached, prompt = [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 5, 6, 7, 8, 9]
    assert Reuse(2).moves(cached, prompt, 2) == [Move(4, 2, 4)]
    assert Reuse(2).moves(cached, prompt, 2, lent=5) == []  # 5 is lent: no chunk begins with it
    assert Reuse(2).moves(cached, [1, 2, 6, 7, 9], 2, lent=5) == [Move(5, 2, 2)]
    assert Reuse(2, sink=3).moves(cached, prompt, 2) == []
    assert Reuse(5).moves(cached, prompt, 2) == []
    assert Reuse(2).kept([Move(4, 2, 4)], 8, lambda _: 3) == 6  # to its end: all are as exact as they were
    assert Reuse(2).kept([Move(4, 2, 3)], 8, lambda _: 3) == 2


def parts(model: Any) -> tuple[list[int], list[int], list[int], list[int]]:
    """Beginning, middle and end of a text, and what a next turn says."""
    tokens = model.tokenize(TEXT[1000:4000].encode())
    return tokens[:100], tokens[100:250], tokens[250:450], model.tokenize(b" Then the clerk said", False)


def greedy(prompt: Sequence[int], limit: int = 16) -> Ticket:
    return Ticket(Request(prompt, GREEDY, limit, ignore_eos=True))


CACHES = pytest.mark.parametrize(
    "cache", [{"kv": "f32"}, {"kv": "q4"}, {"kv": "q4", "sink": 4, "recent": 32}], ids=str
)


@CACHES
def test_a_conversation_that_lost_its_middle(model: Any, cache: dict[str, Any]) -> None:
    begin, middle, end, more = parts(model)
    one = scheduler(model, 1, cache=cache, reuse=Reuse(64, cache.get("sink", 0)))
    first = greedy(begin + middle + end)
    run(one, first)
    said = one.slots[0].tokens[len(begin + middle + end) :]
    prompt = begin + end + said + more
    second = greedy(prompt)
    text = run(one, second)[0]

    # the same by the session's own verbs
    session = scheduler(model, 1, cache=cache).session
    session.decode(begin + middle + end, output="none")
    for token in said:
        session.decode([token], output="none")
    kept = len(begin + end + said)
    session.seq_rm(0, len(begin), len(begin + middle))
    session.seq_add(0, len(begin + middle), -1, -len(middle))
    assert session.seq_pos_max(0) == kept - 1
    logits = session.decode(more)
    tokens: list[int] = []
    for _ in range(16):
        tokens.append(int(logits[-1].argmax()))
        logits = session.decode(tokens[-1:])
    assert text == model.detokenize(tokens).decode()

    timings = second.progress.timings
    assert (timings.cached_n, timings.prompt_n) == (kept, len(more))
    assert one.counters.cached_tokens == kept
    assert one.slots[0].tokens[: len(prompt)] == prompt
    assert one.session.seq_pos_max(0) + 1 == one.session.n_cells_used() == len(one.slots[0].tokens)
    without = scheduler(model, 1, cache=cache)
    run(without, greedy(begin + middle + end))
    computed = greedy(prompt)
    run(without, computed)
    assert computed.progress.timings.prompt_n >= len(end + said + more)


def test_moved_rows_are_near_those_of_a_fresh_prompt(model: Any) -> None:
    """Near, not equal: they were computed behind what is gone."""
    begin, middle, end, more = parts(model)

    def logits(moved: bool) -> np.ndarray:
        session = scheduler(model, 1).session
        if moved:
            session.decode(begin + middle + end, output="none")
            session.seq_rm(0, len(begin), len(begin + middle))
            session.seq_add(0, len(begin + middle), -1, -len(middle))
        else:
            session.decode(begin + end, output="none")
        return log_softmax(session.decode(more, output="all"))

    fresh, moved = logits(False), logits(True)
    divergence = float((np.exp(fresh) * (fresh - moved)).sum(-1).mean())
    print(f"{divergence:.5f} nats a token")
    assert 0 < divergence < 0.05


@CACHES
def test_again_and_in_several_chunks(model: Any, cache: dict[str, Any]) -> None:
    """Every turn loses a piece at another place; what was moved once is moved again."""
    one = scheduler(model, 1, cache=cache, reuse=Reuse(16, cache.get("sink", 0)))
    text = model.tokenize(TEXT[1000:5000].encode())[:700]
    n_cached = 0
    for _ in range(4):
        ticket = greedy(text, 8)
        run(one, ticket)
        slot = one.slots[0]
        assert slot.tokens[: len(text)] == text
        assert one.session.seq_pos_max(0) + 1 == len(slot.tokens)
        n_cached += ticket.progress.timings.cached_n
        text = slot.tokens[:50] + slot.tokens[90:200] + slot.tokens[260:] + [7, 8, 9]
    assert n_cached > 3 * 200
    assert slot.shifted_at == 50
    fresh = scheduler(model, 1, cache=cache)
    assert len(run(fresh, greedy(text))[0])


def test_tokens_of_others_do_not_move(model: Any) -> None:
    two = scheduler(model, 2, 2048, reuse=Reuse(32))
    begin, middle, end, more = parts(model)
    text = begin + middle + end
    alone = run(scheduler(model, 1, 2048), greedy(text, 120))[0]
    first, second = greedy(text, 120), greedy([*text, *more], 4)
    two.submit(first)
    while not first.progress.completion_tokens:
        two.step()
    two.submit(second)
    while two.slots[1 - first.progress.slot].job or not second.progress.completion_tokens:
        two.step()
    assert second.progress.timings.cached_n >= len(text) - 1
    third = greedy(begin + end + more, 4)
    run(two, third)
    assert third.progress.timings.cached_n == len(begin)
    assert "".join(piece.text for piece in first) == alone


def test_what_was_moved_is_no_beginning_of_others(model: Any) -> None:
    from latentkv.engine.store import PrefixStore

    store = PrefixStore("m", 64 << 20)
    two = scheduler(model, 2, 2048, reuse=Reuse(64), store=store)
    begin, middle, end, more = parts(model)
    run(two, greedy(begin + middle + end))
    slot = max(two.slots, key=lambda each: len(each.tokens))
    moved = greedy(begin + end + more)
    run(two, moved)
    assert slot.shifted_at == len(begin)
    n_kept = len(store)
    two.room.park(slot)
    assert len(store) == n_kept
    prompt = begin + end + more + [5]
    alone = run(scheduler(model, 1, 2048), greedy(prompt))
    assert run(two, greedy(prompt)) == alone


def test_where_rows_cannot_move(plain: Any, model: Any) -> None:
    from latentkv import _core

    session = _core.Session(plain, n_ctx=64)
    with pytest.raises(LatentKVError, match=r"\[--cache-reuse\] expected K that is rebuilt .* K path full"):
        Reuse.of(plain, session, 64, 0)
    session = _core.Session(model, n_ctx=64)
    assert Reuse.of(model, session, 64, 4) == Reuse(64, 4)


def test_a_prompt_of_llama_cpps_kind(converted: Callable[..., Path], serve: Callable[..., Any]) -> None:
    """Over HTTP: the usage says how much was cached, moved tokens with it."""
    import httpx

    path = converted("--method", "eigen", "--keep", "0.75")
    begin, middle, end = (TEXT[at : at + 600] for at in (1000, 2000, 3000))
    with serve(path, "-c", "2048", "-np", "1", "--cache-reuse", "64", "--temp", "0") as address:

        def ask(prompt: str) -> dict[str, Any]:
            body = {"prompt": prompt, "max_tokens": 4}
            answer: dict[str, Any] = httpx.post(f"{address}/v1/completions", json=body, timeout=60).json()
            return answer

        whole = ask(begin + middle + end)["usage"]
        cut = ask(begin + end + "Then")
    assert whole["prompt_tokens_details"]["cached_tokens"] == 0
    cached, n_prompt = cut["usage"]["prompt_tokens_details"]["cached_tokens"], cut["usage"]["prompt_tokens"]
    assert cached > 0.9 * n_prompt
    assert cut["timings"]["cached_n"] == cached
    assert cut["timings"]["prompt_n"] == n_prompt - cached


def test_the_command_says_why_not(converted: Callable[..., Path]) -> None:
    import subprocess
    import sys

    path = converted("--method", "none", "--outtype", "f32")
    command = [sys.executable, "-m", "latentkv", "serve", str(path), "-c", "256", "--cache-reuse", "64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "[--cache-reuse] expected K that is rebuilt at its position; got K path full" in line
