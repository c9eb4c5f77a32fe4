"""latentkv.engine: requests beside each other get what each gets alone, and a full cache lets them wait."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from asking import GREEDY, TEXT, WORDS, asked, run, scheduler

from latentkv.engine.engine import Engine
from latentkv.engine.request import Request, StepError, Ticket
from latentkv.engine.scheduler import Scheduler
from latentkv.engine.shift import Shift
from latentkv.engine.store import PrefixStore
from latentkv.errors import LatentKVError
from latentkv.sampling.grammar import LlamaGrammar
from latentkv.sampling.options import SamplingOptions
from latentkv.server import errors
from latentkv.session.prefix import common, kept

LAZY = {"n_ubatch": 8, "prefill": "lazy", "kv": "q8_0"}  # all of a prompt in one call


@pytest.fixture(scope="session")
def model(converted: Callable[..., Path]) -> Any:
    from latentkv import _core

    return _core.Model(str(converted("--method", "none", "--outtype", "f32")))


@pytest.mark.parametrize("cache", [{}, {"sink": 4, "recent": 32}], ids=["no window", "window"])
def test_beside_others_and_alone(model: Any, cache: dict[str, Any]) -> None:
    prompts = [TEXT[at : at + 30 + at // 10] for at in range(1000, 9000, 1000)]
    alone = [run(scheduler(model, 1, cache=cache), asked(model, prompt))[0] for prompt in prompts]
    together = scheduler(model, 3, cache=cache)
    assert run(together, *(asked(model, prompt) for prompt in prompts)) == alone
    assert len(set(alone)) > 5
    assert not together.running
    assert together.counters.requests == len(prompts)


def test_prompts_go_in_pieces_beside_answers(model: Any) -> None:
    both = scheduler(model, 2, 2048)
    first, second = asked(model, "The clerk", 60), asked(model, "word " * 300, 4)
    both.submit(first)
    both.step()
    both.submit(second)
    n_before = first.progress.completion_tokens
    while not second.progress.completion_tokens:
        both.step()
    steps = len(second.request.prompt) // 128
    assert first.progress.completion_tokens - n_before >= steps >= 2
    alone = run(scheduler(model, 1, 2048), asked(model, "word " * 300, 4))
    run(both)
    assert "".join(piece.text for piece in second) == alone[0]


def test_json_without_room_is_closed(model: Any) -> None:
    """Beside each other, each with its own limit: what is open ends, and what is required comes."""
    text = {"type": "object", "properties": {"text": {"type": "string"}, "n": {"type": "null"}}}
    grammar = LlamaGrammar.from_json_schema(text | {"required": ["text", "n"]})
    endless = {model.find_token('"'): -30.0}  # of a string, that is
    options = SamplingOptions(temperature=0, grammar=grammar, logit_bias=endless)
    tickets = [
        Ticket(Request(model.tokenize(b"The clerk"), options, max_tokens=limit)) for limit in (40, 70, 100)
    ]
    answers = run(scheduler(model, 3), *tickets)
    assert [set(json.loads(answer)) for answer in answers] == [{"text", "n"}] * 3
    assert [30 < t.progress.completion_tokens < t.request.max_tokens for t in tickets[1:]] == [True] * 2


def test_a_full_cache_lets_requests_wait(model: Any) -> None:
    small = scheduler(model, 4, 192)
    tickets = [asked(model, word, 60) for word in WORDS]
    alone = [run(scheduler(model, 1, 192), asked(model, word, 60))[0] for word in WORDS]
    most = 0
    for ticket in tickets:
        small.submit(ticket)
    while small.step():
        most = max(most, len(small.running))
        assert small.session.n_cells_used() <= 192
    assert ["".join(piece.text for piece in ticket) for ticket in tickets] == alone
    assert 1 <= most < 4


def test_without_a_limit_an_answer_grows_to_the_end(model: Any) -> None:
    only = scheduler(model, 2, 512)
    ticket = Ticket(Request(model.tokenize(b"The clerk"), GREEDY, ignore_eos=True))
    run(only, ticket)
    assert ticket.progress.prompt_tokens + ticket.progress.completion_tokens == 512


def test_a_sequence_has_its_own_limit(model: Any) -> None:
    short = scheduler(model, 2, 512, n_ctx_seq=64)
    ticket = Ticket(Request(model.tokenize(b"The clerk"), GREEDY, ignore_eos=True))
    run(short, ticket)
    assert ticket.progress.prompt_tokens + ticket.progress.completion_tokens == 64
    with pytest.raises(LatentKVError, match=r"\[context\] expected a prompt of at most 63 tokens; got 6"):
        short.check(asked(model, "word " * 64))


def test_what_begins_alike_is_computed_once(model: Any) -> None:
    one = scheduler(model, 2)
    text = "The clerk of the town wrote numbers into a book. " * 4
    first, second = asked(model, text), asked(model, text + "Then he")
    run(one, first)
    run(one, second)
    assert second.progress.timings.cached_n >= len(model.tokenize(text.encode())) - 1
    assert run(one, asked(model, text + "Then he")) == run(
        scheduler(model, 1), asked(model, text + "Then he")
    )


def test_a_running_answer_lends_its_prompt(model: Any) -> None:
    two = scheduler(model, 2)
    text = "The clerk of the town wrote numbers into a book. " * 8
    first, second = asked(model, text, 40), asked(model, text + "Then he")
    two.submit(first)
    two.step()
    two.submit(second)
    two.step()
    assert len(two.running) == 2
    assert second.progress.timings.cached_n > 64
    assert two.session.n_cells_used() < len(first.request.prompt) + len(second.request.prompt)
    alone = run(scheduler(model, 1), asked(model, text, 40))[0]
    run(two)
    assert "".join(piece.text for piece in first) == alone


def test_a_cancelled_answer_ends_within_a_step(model: Any) -> None:
    two = scheduler(model, 2)
    first, second, third = (
        asked(model, "The clerk", 500),
        asked(model, "Cache", 20),
        asked(model, "A river", 5),
    )
    for ticket in (first, second, third):
        two.submit(ticket)
    two.step()
    assert first.progress.slot >= 0 > third.progress.slot
    first.cancel()
    two.step()
    assert third.progress.slot >= 0
    run(two)
    assert [second.progress.completion_tokens, third.progress.completion_tokens] == [20, 5]


def test_a_cancelled_prompt_gives_its_sequence_back_within_a_step(model: Any) -> None:
    one = scheduler(model, 1, 4096)
    first, second = asked(model, TEXT[:12000], 4), asked(model, "The clerk", 4)
    for ticket in (first, second):
        one.submit(ticket)
    one.step()
    assert not one.slots[0].has_read
    first.cancel()
    one.step()
    assert second.progress.slot == 0
    run(one)
    assert [first.progress.completion_tokens, second.progress.completion_tokens] == [0, 4]


def left_within_a_step(one: Any, ticket: Any) -> None:
    """Whoever asked leaves once the step's decode has begun."""
    has_begun, decode = threading.Event(), one._decode

    def watched(batch: Any) -> Any:
        has_begun.set()
        return decode(batch)

    one._decode = watched
    thread = threading.Thread(target=one.step)
    thread.start()
    has_begun.wait()
    ticket.cancel()
    while thread.is_alive():
        one.leave_off()
        thread.join(0.001)
    one._decode = decode


@pytest.mark.parametrize("cache", [{}, {"kv": "q4", "sink": 4, "recent": 32}], ids=["no window", "window"])
def test_what_was_read_stays_when_who_asked_leaves(model: Any, cache: dict[str, Any]) -> None:
    """Before the step that is left off. Whoever asks next goes on from it."""
    one = scheduler(model, 1, 4096, cache={"n_ubatch": 1024, **cache}, n_batch=1024)
    ticket = asked(model, TEXT[:12000], 4)
    assert len(ticket.request.prompt) > 2048
    one.submit(ticket)
    one.step()
    n_read = len(one.slots[0].tokens)
    assert 0 < n_read <= 1024
    left_within_a_step(one, ticket)
    assert not one.running
    assert len(one.slots[0].tokens) == n_read == one.session.seq_pos_max(0) + 1
    again = asked(model, TEXT[:12000], 4)
    said = run(one, again)
    assert again.progress.timings.cached_n == n_read
    alone = scheduler(model, 1, 4096, cache={"n_ubatch": 1024, **cache}, n_batch=1024)
    assert said == run(alone, asked(model, TEXT[:12000], 4))


def test_a_prompt_that_nobody_waits_for_is_not_read_to_its_end(model: Any) -> None:
    one = scheduler(model, 1, 4096, cache=LAZY)
    ticket = asked(model, TEXT[:8000], 4)
    assert len(ticket.request.prompt) > 1000
    one.submit(ticket)
    left_within_a_step(one, ticket)
    assert one.counters.steps == 1
    assert not one.running
    assert one.slots[0].tokens == []
    assert one.session.n_cells_used() == 0
    alone = run(scheduler(model, 1, 4096, cache=LAZY), asked(model, "The clerk"))
    assert run(one, asked(model, "The clerk")) == alone


def test_an_error_of_one_leaves_the_others(model: Any) -> None:
    from latentkv.sampling.grammar import LlamaGrammar

    two = scheduler(model, 2)
    bad = Ticket(Request([1, 2], SamplingOptions(grammar=LlamaGrammar("root ::= (")), 5))
    good = asked(model, "The clerk")
    two.submit(bad)
    two.submit(good)
    assert run(two, asked(model, "Cache"))[0]
    with pytest.raises(ValueError, match="grammar"):
        list(bad)
    assert "".join(piece.text for piece in good)


def test_an_engine_answers_threads_and_closes(model: Any) -> None:
    with Engine(scheduler(model, 2)) as engine:
        tickets = [engine.submit(asked(model, word).request) for word in WORDS]
        texts = ["".join(piece.text for piece in ticket) for ticket in tickets]
        assert texts == [run(scheduler(model, 1), asked(model, word))[0] for word in WORDS]
        assert engine.call(lambda s: len(s.running)) == 0
        endless = engine.submit(asked(model, "The clerk", 900, ignore_eos=True).request)
        next(iter(endless))
    with pytest.raises(LatentKVError, match="closed"):
        list(endless)
    with pytest.raises(LatentKVError, match="closed"):
        engine.submit(asked(model, "x").request)


def recent(count: int) -> Callable[[int], int]:
    """Session.n_recent of a cache with `count` exact recent tokens."""
    return lambda length: count


def test_how_much_of_a_cache_a_prompt_keeps() -> None:
    cached = list(range(100))
    assert common(cached, [*range(40), 7]) == 40
    assert common(cached, cached) == 100
    assert common([], cached) == 0
    assert kept(cached, [*cached, 5], recent(32), rewinds=True) == 100  # goes on
    assert kept(cached, [*range(60), 7], recent(0), rewinds=True) == 60
    assert kept(cached, [*range(60), 7], recent(32), rewinds=True) == 28  # as many again were compressed
    assert kept(cached, [*range(60), 7], recent(128), rewinds=True) == 60  # nothing was
    assert kept(cached, [*range(60), 7], recent(0), rewinds=False) == 0
    assert kept(cached, cached[:50], recent(0), rewinds=True) == 49  # the last gives logits


def test_an_answer_goes_on_past_its_context(converted: Callable[..., Path], model: Any) -> None:
    from latentkv import _core

    rebuilt = _core.Model(str(converted("--method", "eigen", "--keep", "0.75")))
    shifting = scheduler(rebuilt, 2, 256, n_ctx_seq=96, shift=Shift.of(rebuilt, 8), cache={"kv": "f16"})
    ticket, other = asked(rebuilt, "The clerk", 300), asked(rebuilt, "Cache", 20)
    begin = rebuilt.tokenize(b"The clerk")
    assert len(run(shifting, ticket, other)) == 2
    assert ticket.progress.completion_tokens == 300
    slot = shifting.slots[ticket.progress.slot]
    assert slot.tokens[: len(begin)] == begin
    assert len(slot.tokens) == shifting.session.seq_pos_max(slot.seq) + 1 < 96
    endless = Ticket(Request(begin, GREEDY, ignore_eos=True))
    shifting.submit(endless)
    for _ in range(400):
        shifting.step()
    assert endless.progress.completion_tokens > 350
    with pytest.raises(
        LatentKVError, match=r"\[--context-shift\] expected K that is rebuilt .* got K path full"
    ):
        Shift.of(model, 0)


@pytest.mark.parametrize(
    "cache", [{}, {"kv": "q4", "sink": 4, "recent": 32}, {"kv_k": "c4", "kv_v": "q4", "recent": 64}], ids=str
)
def test_a_sequence_that_lost_its_place_comes_back(model: Any, cache: dict[str, Any], tmp_path: Path) -> None:
    def one(store: PrefixStore | None) -> Scheduler:
        return scheduler(model, 1, cache=cache, store=store)

    first, other = TEXT[1000:1800], TEXT[5000:5900]
    more = first + TEXT[1800:1830]
    least = len(model.tokenize(first.encode())) - 1 - cache.get("recent", 0)
    for folder, ram in ((None, 64 << 20), (tmp_path, 0)):
        store = PrefixStore("m", ram, folder, 64 << 20)
        served = one(store)
        run(served, asked(model, first))
        run(served, asked(model, other))
        assert len(store) == 1
        ticket = asked(model, more)
        said = run(served, ticket)
        assert ticket.progress.timings.cached_n >= least
        kept_on = one(None)
        run(kept_on, asked(model, first))
        assert said == run(kept_on, asked(model, more))
        served.close(LatentKVError("stopped"))
    again = one(PrefixStore("m", 0, tmp_path, 64 << 20))
    ticket = asked(model, more)
    assert run(again, ticket) == said
    assert again.counters.restored_tokens >= least


def test_kept_rows_of_other_formats(
    converted: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Finer ones are coded anew; coarser ones are left to those whose they are."""
    from latentkv import _core

    rebuilt = _core.Model(str(converted("--method", "eigen", "--keep", "0.75")))
    first, more = TEXT[1000:1800], TEXT[1000:1830]

    def one(kv: str) -> Scheduler:
        store = PrefixStore("m", 0, tmp_path, 64 << 20, formats=kv)
        return scheduler(rebuilt, 1, cache={"kv": kv}, store=store)

    for kv in ("q8", "q4"):
        served = one(kv)
        run(served, asked(rebuilt, first))
        served.close(LatentKVError("stopped"))
        if kv == "q8":
            assert served.counters.restored_tokens == 0
    assert served.counters.restored_tokens > 200
    assert (
        "tokens were kept in finer row formats, and are coded anew: bits are lost" in capfd.readouterr().err
    )
    for path in tmp_path.rglob("*.state"):
        if path.stem.endswith(served.store._formats):
            continue
        path.unlink()  # q4 is left
    served = one("q8")
    n_computed = len(rebuilt.tokenize(more.encode()))
    for _ in range(2):
        ticket = asked(rebuilt, more)
        said = run(served, ticket)
        assert said == run(scheduler(rebuilt, 1, cache={"kv": "q8"}), asked(rebuilt, more))
    assert served.counters.restored_tokens == 0
    assert served.counters.prompt_tokens <= n_computed + 1
    noted = capfd.readouterr().err
    assert (
        noted.count("tokens that are kept in other row formats are computed anew: [state] expected rows") == 1
    )
    served.close(LatentKVError("stopped"))


def test_what_the_store_pushes_out_meanwhile_is_no_end(model: Any) -> None:
    """Two long sequences and a store of one: each takes the other's place."""
    first, second = TEXT[1000:1800], TEXT[5000:5900]
    probe = scheduler(model, 1)
    run(probe, asked(model, first))
    n_bytes = len(probe.session.seq_state_bytes(0))
    only = scheduler(model, 1, store=PrefixStore("m", n_bytes * 5 // 4))
    texts = [run(only, asked(model, text))[0] for text in (first, second, first, second)]
    assert texts[:2] == texts[2:]
    assert only.counters.restored_tokens > 200
    assert only.store is not None
    assert len(only.store) == 1


def test_an_engine_outlives_a_bug(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(scheduler(model, 2)) as engine:
        with monkeypatch.context() as broken:
            broken.setattr(engine.scheduler, "_admit", lambda: 1 / 0)
            with pytest.raises(StepError, match=r"\[engine\] expected a step that .* ZeroDivisionError"):
                list(engine.submit(asked(model, "The clerk").request))
        gone = engine.submit(asked(model, "Cache").request, deliver=lambda items: [][1])
        assert "".join(piece.text for piece in engine.submit(asked(model, "The clerk").request))
        assert gone.cancelled


class FailsOnce:
    """A session whose decode call fails once, before or behind what it computes."""

    def __init__(self, session: Any, error: Exception, computes: bool) -> None:
        self.session, self.error, self.computes, self.is_armed = session, error, computes, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_armed:
            return self.session.decode(*args, **kwargs)
        self.is_armed = False
        if self.computes:
            self.session.decode(*args, **kwargs)
        raise self.error


@pytest.mark.parametrize("computes", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("error", [RuntimeError("no\nmemory"), LatentKVError("[compute] expected 6; got 5")])
def test_an_engine_outlives_a_call_that_fails(
    model: Any, computes: bool, error: Exception, capfd: pytest.CaptureFixture[str]
) -> None:
    two = scheduler(model, 2)
    want = [run(scheduler(model, 1), asked(model, word))[0] for word in WORDS[:3]]
    assert run(two, asked(model, WORDS[2])) == want[2:]
    before = two.session.n_cells_used()
    session: Any = FailsOnce(two.session, error, computes)
    two.session = session
    for ticket in (failed := [asked(model, word, 50) for word in WORDS[:2]]):
        two.submit(ticket)
    two.step()
    session.is_armed = True
    two.step()
    for ticket in failed:
        with pytest.raises(StepError, match="expected a step that runs; got"):
            list(ticket)
        refused = errors.of(ticket.error or error)
        assert (refused.status, "\n" in refused.message) == (500, False)
        assert errors.body(refused)["error"]["type"] == "server_error"
    assert not two.running
    assert two.session.n_cells_used() <= before
    assert capfd.readouterr().err.count("error: [engine] expected a step that runs; got") == 1
    again = [asked(model, word) for word in WORDS[:3]]
    assert run(two, *again) == want
    assert two.session.n_cells_used() > 0


def test_a_shift_moves_no_tokens_of_another_answer(converted: Callable[..., Path]) -> None:
    from latentkv import _core

    rebuilt = _core.Model(str(converted("--method", "eigen", "--keep", "0.75")))
    text = "The clerk of the town wrote numbers into a book. " * 12

    def shifting(n_seq: int) -> Scheduler:
        return scheduler(rebuilt, n_seq, 1024, n_ctx_seq=256, shift=Shift.of(rebuilt, 4), cache={"kv": "f16"})

    two = shifting(2)
    first, second = asked(rebuilt, text, 200), asked(rebuilt, text + "Then he", 40)
    two.submit(first)
    while not first.progress.completion_tokens:
        two.step()
    said = run(two, second)[0]
    assert first.progress.completion_tokens == 200
    assert said == run(shifting(1), asked(rebuilt, text + "Then he", 40))[0]
    # nor is what stands behind forgotten tokens the beginning of another prompt
    slot = two.slots[first.progress.slot]
    again = Ticket(Request([*slot.tokens, 5], GREEDY, 8, ignore_eos=True))
    alone = Ticket(Request([*slot.tokens, 5], GREEDY, 8, ignore_eos=True))
    assert run(two, again) == run(shifting(1), alone)
    assert again.progress.timings.cached_n <= 4


def test_a_prompt_without_an_answer(model: Any) -> None:
    ticket = asked(model, "The clerk", 0)
    assert run(scheduler(model, 2), ticket) == [""]
    assert ticket.progress.completion_tokens == 0
    assert ticket.progress.timings.prompt_n == ticket.progress.prompt_tokens


@pytest.mark.parametrize("cache", [{}, {"sink": 4, "recent": 32}], ids=["no window", "window"])
def test_choices_that_come_together_read_their_prompt_once(model: Any, cache: dict[str, Any]) -> None:
    four = scheduler(model, 4, 2048, cache=cache)
    prompt = TEXT[1000:2200]
    tickets = [asked(model, prompt) for _ in range(3)] + [asked(model, "Cache")]
    for ticket in tickets:
        four.submit(ticket)
    four.step()
    assert [ticket.progress.slot >= 0 for ticket in tickets] == [True, False, False, True]
    run(four)
    alone = run(scheduler(model, 1, 2048, cache=cache), asked(model, prompt))[0]
    texts = ["".join(piece.text for piece in ticket) for ticket in tickets]
    assert texts[:3] == [alone] * 3
    for ticket in tickets[1:3]:
        # nobody waits for less than a tile more
        assert ticket.progress.timings.prompt_n <= 64 + 1 + cache.get("recent", 0)


def test_broken_blocks_count_as_taken(model: Any) -> None:
    """A rewind leaves holes in blocks of 32 slots that only a whole block can take again."""
    cache = {"kv": "", "kv_k": "c4", "kv_v": "q4", "recent": 32}
    one = scheduler(model, 1, 512, cache=cache)
    text = model.tokenize(TEXT[1000:2000].encode())
    for cut in (200, 150, 110, 75):
        ticket = Ticket(Request([*text[:cut], 7], GREEDY, ignore_eos=True))
        run(one, ticket)
        assert ticket.progress.completion_tokens > 300 - cut


def test_under_eviction_a_sequence_goes_on_or_is_computed_anew(model: Any) -> None:
    evicting = scheduler(model, 2, cache={"evict": "h2o", "keep_tokens": "100", "sink": 4, "recent": 0})
    text = TEXT[1000:2000]
    first, again, other = asked(model, text), asked(model, text), asked(model, text[:500])
    answers = run(evicting, first)
    assert run(evicting, again) == answers
    assert again.progress.timings.cached_n == 0
    held = list(max((slot.tokens for slot in evicting.slots), key=len))
    longer = Ticket(Request([*held, 7, 8, 9], GREEDY, 12, ignore_eos=True))
    run(evicting, longer, other)
    assert longer.progress.timings.cached_n == len(held)
    assert other.progress.timings.cached_n == 0
    assert longer.progress.completion_tokens == other.progress.completion_tokens == 12
