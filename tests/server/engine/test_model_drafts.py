"""A smaller model's guesses (`-md`): answers are those without, and sequences are followed as they change."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from asking import TEXT, WORDS, are_whole, asked, run, scheduler

from latentkv.drafts import judged
from latentkv.drafts import model as drafts
from latentkv.drafts.lookup import Lookup
from latentkv.drafts.model import Drafter, require_same_vocabulary
from latentkv.drafts.worth import GPU, Step
from latentkv.engine.drafting import Drafting
from latentkv.errors import LatentKVError


@pytest.fixture(scope="session")
def model(converted: Callable[..., Path]) -> Any:
    from latentkv import _core

    return _core.Model(str(converted("--method", "none", "--outtype", "f32")))


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts pay on a CPU only where nearly all come true, which the toy's own do, unsure as it is."""
    monkeypatch.setattr(judged, "LIKELY", 0.99)
    monkeypatch.setattr(judged, "LEAST_SURE", 0.0)
    monkeypatch.setattr(Lookup, "guesses", lambda *_: [])


def drafter(model: Any, n_seq: int = 1, n_ctx: int = 1024, cost: float = 0.01) -> Drafter:
    """Of the model itself: all that it guesses comes true."""
    from latentkv import _core

    return Drafter(_core.Session(model, n_ctx=n_ctx, n_seq_max=n_seq, kv="f32", n_threads=1), cost)


def answers(model: Any, own: Drafter | None, texts: tuple[str, ...], limit: int = 60) -> tuple[Any, Any]:
    """Tokens of each, and the scheduler that wrote them."""
    drafting = None if own is None else Drafting(model=own)
    one = scheduler(model, len(texts), 1024 * len(texts), drafting=drafting)
    tickets = [asked(model, text, limit) for text in texts]
    run(one, *tickets)
    assert are_whole(one)
    return [list(ticket.progress.tokens) for ticket in tickets], one


def test_an_answer_is_what_it_is_without_guesses(model: Any) -> None:
    want, plain = answers(model, None, (WORDS[0],))
    got, one = answers(model, drafter(model), (WORDS[0],))
    assert got == want
    assert one.counters.accepted_tokens > 40
    assert one.counters.steps < plain.counters.steps - 35


def test_sequences_draft_beside_each_other(model: Any) -> None:
    texts = (WORDS[0], TEXT[3000:3300], *WORDS[1:3])
    want, _ = answers(model, None, texts)
    got, one = answers(model, drafter(model, 4, 4096), texts)
    assert got == want
    assert one.counters.accepted_tokens > 100


def test_a_long_text_is_read_in_pieces(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is there nothing is guessed, and no step waits for more than a piece."""
    monkeypatch.setattr(drafts, "PIECE", 32)
    own = drafter(model)
    longest = 0
    decode = own._decode

    def watched(tokens: list[int], seq: int) -> Any:
        nonlocal longest
        longest = max(longest, len(tokens))
        return decode(tokens, seq)

    monkeypatch.setattr(own, "_decode", watched)
    want, _ = answers(model, None, (TEXT[:1200],))
    got, one = answers(model, own, (TEXT[:1200],))
    assert got == want
    assert longest == 32
    assert one.counters.accepted_tokens > 20


def test_guesses_that_fail_are_given_up(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is sure and wrong drafts no more after a few steps."""
    own = drafter(model)
    wrong = np.full(model.n_vocab, -30.0, np.float32)
    wrong[7] = 30.0
    decode = own._decode
    monkeypatch.setattr(own, "_decode", lambda tokens, seq: (decode(tokens, seq), wrong)[1])
    want, _ = answers(model, None, (WORDS[0],), 200)
    got, one = answers(model, own, (WORDS[0],), 200)
    assert got == want
    assert 0 < one.counters.drafted_tokens < 60
    assert one.counters.accepted_tokens < 5


def test_each_answer_is_judged_anew(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one that it guessed wrong it drafts again."""
    own, decode = drafter(model), Drafter._decode
    wrong = np.eye(1, model.n_vocab, 7, dtype=np.float32)[0] * 60
    one = scheduler(model, 1, 1024, drafting=Drafting(model=own))
    with monkeypatch.context() as patch:
        patch.setattr(own, "_decode", lambda tokens, seq: (decode(own, tokens, seq), wrong)[1])
        run(one, asked(model, WORDS[0], 100))
    before = one.counters.accepted_tokens
    run(one, asked(model, WORDS[1], 60))
    assert one.counters.accepted_tokens > before + 40


def test_it_follows_a_sequence_that_changes(model: Any) -> None:
    """A shorter text, another one behind a common beginning, and one that leaves no room for others."""
    own = drafter(model, 2, 512)
    first = model.tokenize(TEXT[:600].encode())
    for tokens in (first, first[:50], [*first[:40], *first[90:120]], first):
        own.begin(0)
        got = own.guesses(0, tokens, Step(1, GPU), 7)
        fresh = drafter(model, 2, 512).guesses(0, tokens, Step(1, GPU), 7)
        assert got == fresh
        assert own._sequences[0].held[: len(tokens)] == list(tokens)
    other = model.tokenize(TEXT[1000:3000].encode())[: 512 - 8]
    assert own.guesses(1, other, Step(1, GPU), 7) == drafter(model, 2, 512).guesses(1, other, Step(1, GPU), 7)
    assert own._sequences[0].held == []
    assert own.guesses(1, [*other, *first], Step(1, GPU), 7) == []  # longer than its cache


def test_what_does_not_pay_is_not_drafted(model: Any) -> None:
    """A model as slow as the one that answers."""
    got, one = answers(model, drafter(model, cost=1.0), (WORDS[0],))
    assert got == answers(model, None, (WORDS[0],))[0]
    assert one.counters.drafted_tokens == 0


def test_chat_takes_one(converted: Callable[..., Path]) -> None:
    file = str(converted("--method", "none", "--outtype", "f32"))

    def chat(*words: str) -> tuple[int, str, str]:
        given = [sys.executable, "-m", "latentkv", "chat", "-m", file, "-p", TEXT[:200], "-n", "12"]
        done = subprocess.run([*given, "--temp", "0", *words], capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout, done.stderr

    plain = chat("-c", "512")
    assert plain[0] == 0
    assert chat("-c", "512", "-md", file)[:2] == plain[:2]
    for words, message in (
        (("-c", "512", "--draft-max", "0"), "guesses beside it"),
        (("-c", "auto"), "-c N and no --kv-budget auto"),
        (("-c", "512", "--kv", "f16", "--evict", "h2o", "--keep-tokens", "50%"), "no --evict beside it"),
    ):
        status, _, said = chat(*words, "-md", file)
        assert status == 2
        assert said.splitlines()[-1].startswith(f"error: [-md] expected {message}")


def test_answers_go_on_without_one_that_fails(
    model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What its cache has by then is not trusted either."""
    own = drafter(model)
    decode, calls = own.session.decode, iter(range(100))

    def failing(*args: Any, **options: Any) -> Any:
        if next(calls) == 5:
            raise MemoryError("no room")
        return decode(*args, **options)

    monkeypatch.setattr(own, "session", SimpleNamespace(**{
        name: getattr(own.session, name) for name in ("n_ctx", "require_room", "seq_rm")
    }, decode=failing))  # fmt: skip
    want, _ = answers(model, None, (WORDS[0],))
    got, one = answers(model, own, (WORDS[0],))
    assert got == want
    assert one.drafting.model is None
    assert own._sequences[0].held == []
    assert capsys.readouterr().err.startswith("warning: [-md] expected guesses; got no room;")


def test_another_vocabulary_is_refused() -> None:
    def vocabulary(*pieces: bytes) -> Any:
        return SimpleNamespace(n_vocab=len(pieces), token_to_piece=lambda token, special: pieces[token])

    own = vocabulary(b"a", b"b", b"c")
    require_same_vocabulary(vocabulary(b"a", b"b"), own)  # padded
    with pytest.raises(
        LatentKVError, match=r"\[-md\] expected a model with the same vocabulary; got token 1 is b'x'"
    ):
        require_same_vocabulary(vocabulary(b"a", b"x", b"c"), own)
    with pytest.raises(LatentKVError, match=r"\[-md\] expected a vocabulary of 3 tokens; got 2000"):
        require_same_vocabulary(vocabulary(b"a", b"b", b"c", *[b"d"] * 1997), own)
