"""Eviction: each layer keeps so many tokens of a sequence, chosen by the attention that they gather."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from eviction_reference import Reference
from runtime import DEMO, distance, model, session, tokens

POLICIES = ("h2o", "keyformer", "snapkv")
EXACT = 1e-4  # f32 rows: only the order of f32 sums differs
KEEP, SINK, N_UBATCH = 100, 4, 24


@pytest.fixture(scope="module")
def plain(converted: Any) -> Any:
    return model(converted("--method", "none", "--outtype", "f32"))


@pytest.fixture(scope="module", params=["plain", "latent", "exact rows"])
def m(request: pytest.FixtureRequest, converted: Any) -> Any:
    options = {
        "plain": ("--method", "none"),
        "latent": ("--method", "palu", "--keep", "0.5", "--group", "2"),
        "exact rows": ("--method", "tale"),
    }
    return model(converted(*options[request.param], "--outtype", "f32"))


def evicting(m: Any, policy: str, **options: Any) -> Any:
    regions = {"sink": SINK, "recent": 0, "keep_tokens": str(KEEP), "n_ubatch": N_UBATCH}
    return session(m, evict=policy, **({"kv": "f32", "prefill": "eager"} | regions | options))


def decoded(s: Any, prompt: list[int], answer: list[int], seq: int = 0) -> Any:
    """Logits of a prompt and of tokens that come one by one behind it."""
    parts = [s.decode(prompt, seq=[seq] * len(prompt), output="all")]
    return np.concatenate(parts + [s.decode([token], seq=[seq]) for token in answer])


def text(m: Any, policy: str) -> tuple[list[int], list[int]]:
    ids = tokens(m, 300)
    return ids[:240], ids[240 : 250 if policy == "snapkv" else 300]


def middle(s: Any) -> dict[str, int]:
    found: dict[str, int] = s.kv_bytes()["regions"][-1]
    assert found["name"] == "middle"
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_it_is_attention_over_the_tokens_that_the_paper_keeps(plain: Any, policy: str) -> None:
    """Against NumPy, which has all rows and leaves out what the policy does."""
    prompt, answer = text(plain, policy)
    want = Reference(DEMO, policy, KEEP, SINK).decode(prompt, answer, N_UBATCH)
    got = decoded(evicting(plain, policy), prompt, answer)
    assert distance(got, want) < EXACT
    for other in {"", *POLICIES} - {policy}:
        differs = decoded(evicting(plain, other) if other else session(plain, kv="f32"), prompt, answer)
        assert distance(differs[KEEP:], want[KEEP:]) > 100 * EXACT


@pytest.mark.parametrize("policy", POLICIES)
def test_fused_masses_choose_as_stock_operations_do(m: Any, policy: str) -> None:
    prompt, answer = text(m, policy)
    for regions in ({}, {"recent": 20, "kv_recent": "f32", "kv_sink": "f32", "keep_tokens": "150"}):
        fused, stock = (
            decoded(evicting(m, policy, implementation=name, **regions), prompt, answer)
            for name in ("fused", "reference")
        )
        assert distance(fused, stock) < EXACT


@pytest.mark.parametrize("policy", POLICIES)
def test_room_for_all_is_no_eviction(m: Any, policy: str) -> None:
    prompt, answer = text(m, policy)
    for regions in ({}, {"recent": 20}):
        got = decoded(evicting(m, policy, keep_tokens="100%", **regions), prompt, answer)
        same = {"kv": "f32", "sink": SINK, "prefill": "eager", "n_ubatch": N_UBATCH}
        want = decoded(session(m, **(same | {"recent": 0, "fixed_window": True} | regions)), prompt, answer)
        assert distance(got, want) < 1e-5


def test_a_layer_keeps_what_was_asked_for_and_no_more_is_allocated(plain: Any) -> None:
    s = evicting(plain, "h2o", n_ctx=2048)
    whole = session(plain, kv="f32", sink=SINK, recent=0, n_ctx=2048).kv_bytes()
    decoded(s, *text(plain, "h2o"))
    bytes_of = s.kv_bytes()
    assert KEEP - SINK - 32 <= middle(s)["used"] <= KEEP - SINK
    assert middle(s)["slots"] == 128  # in tiles of 64
    rows = bytes_of["k"] + bytes_of["v"]
    assert rows == (whole["k"] + whole["v"]) * (128 + 16) // (2048 + 16)
    a_layer = 128 * (4 + 8 + 4)  # position, sequences and mass of every slot
    assert bytes_of["cells"] == whole["cells"] + plain.n_layer * a_layer
    assert bytes_of["total"] == rows + bytes_of["cells"]
    assert bytes_of["f16_per_token"] == whole["f16_per_token"]
    assert (
        plain.forecast(2048, kv="f32", sink=SINK, recent=0, evict="h2o", keep_tokens=str(KEEP))["total"]
        == bytes_of["total"]
    )
    assert s.n_cells_used() == 300


def test_a_share_is_of_a_sequences_context(plain: Any) -> None:
    for share, n_seq_max, slots in (("50%", 1, 512), ("50%", 2, 512), ("25%", 2, 256), ("100%", 2, 1024)):
        s = evicting(plain, "h2o", n_ctx=1024, keep_tokens=share, n_seq_max=n_seq_max)
        assert middle(s)["slots"] == slots


@pytest.mark.parametrize("policy", POLICIES)
def test_sequences_do_not_hear_each_other(m: Any, policy: str) -> None:
    prompt, answer = text(m, policy)
    other = list(reversed(prompt))
    alone = decoded(evicting(m, policy), prompt, answer)
    s = evicting(m, policy, n_seq_max=3, n_ctx=1024)
    s.decode(other, seq=[2] * len(other))
    assert distance(decoded(s, prompt, answer, seq=1), alone) < EXACT
    both = evicting(m, policy, n_seq_max=2, n_ctx=1024, n_ubatch=2 * N_UBATCH)
    parts = []
    for first in range(0, len(prompt), N_UBATCH):
        here, there = prompt[first : first + N_UBATCH], other[first : first + N_UBATCH]
        got = both.decode(here + there, seq=[0] * len(here) + [1] * len(there), output="all")
        parts.append(got[: len(here)])
    assert distance(np.concatenate(parts), alone[: len(prompt)]) < EXACT


def test_a_sequence_goes_as_a_whole(plain: Any) -> None:
    prompt, answer = text(plain, "h2o")
    s = evicting(plain, "h2o", n_seq_max=2, n_ctx=1024)
    first = decoded(s, prompt, answer)
    s.decode(prompt, seq=[1] * len(prompt))
    assert not s.seq_rm(0, 100, -1)  # what went had been chosen by those behind, too
    assert s.seq_pos_max(0) == 299
    assert s.seq_rm(0, 300, -1)  # nothing
    assert s.seq_rm(0)
    assert np.array_equal(decoded(s, prompt, answer), first)
    for verb in (lambda: s.seq_cp(0, 1), lambda: s.seq_add(0, 10, 300, -5)):
        with pytest.raises(ValueError, match=r"expected whole sequences that stay .*h2o.*--evict none; got"):
            verb()
    s.seq_keep(1)
    assert s.seq_pos_max(0) == -1
    assert s.seq_pos_max(1) == len(prompt) - 1
    assert np.array_equal(decoded(s, prompt, answer), first)
    s.clear()
    assert np.array_equal(decoded(s, prompt, answer), first)


def test_what_snapkv_may_not_give_up_is_refused(plain: Any) -> None:
    s = evicting(plain, "snapkv", n_ctx=1024)
    ids = tokens(plain, 400)
    s.decode(ids[:200])

    def answer() -> None:
        for token in ids[200:]:
            s.decode([token], output="none")

    with pytest.raises(ValueError, match=r"\[keep_tokens\] expected room for 1 more tokens .*; raise --keep"):
        answer()
    assert 200 + KEEP - SINK - 32 - 12 <= s.n_cells_used() <= 200 + KEEP
    assert s.seq_rm(0)
    s.decode(ids[:200])


def test_a_refused_batch_takes_nothing_from_others(plain: Any) -> None:
    ids = tokens(plain, 400)
    full, untouched = (evicting(plain, "snapkv", n_ctx=1024, n_seq_max=2) for _ in range(2))
    for s in (full, untouched):
        s.decode(ids[:220], seq=[0] * 220)

    def fill() -> None:
        for token in ids:
            full.decode([token], seq=[1], output="none")

    with pytest.raises(ValueError, match=r"\[keep_tokens\]"):
        fill()
    n = N_UBATCH - 1  # more than the first sequence gives up for one token
    for first in range(220, 226):
        with pytest.raises(ValueError, match=r"\[keep_tokens\]"):
            full.decode([*ids[:n], 5], seq=[*[0] * n, 1], output="none")
        got, want = (s.decode([ids[first]], seq=[0]) for s in (full, untouched))
        assert distance(got, want) < EXACT


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"evict": "h3o"}, "[evict] expected one of h2o keyformer snapkv none; got 'h3o'"),
        ({"evict": "none"}, "[keep_tokens] expected a policy beside it, --evict h2o; got none"),
        (
            {"keep_tokens": ""},
            "[keep_tokens] expected a number of tokens, or a share of the context up to 100%",
        ),
        ({"keep_tokens": "0.5"}, "[keep_tokens] expected a number of tokens, or a share"),
        ({"keep_tokens": "-3"}, "[keep_tokens] expected a number of tokens, or a share"),
        ({"keep_tokens": "101%"}, "[keep_tokens] expected a number of tokens, or a share"),
        ({"keep_tokens": "nan%"}, "[keep_tokens] expected a number of tokens, or a share"),
        ({"keep_tokens": "67"}, "[keep_tokens] expected at least 68 tokens: 4 sinks, 0 recent ones and 64"),
        ({"recent": 40}, "[keep_tokens] expected at least 108 tokens: 4 sinks, 40 recent ones and 64"),
        ({"recent": -1, "recent_ratio": 0.1}, "[evict] expected a number of recent tokens, --recent N; got"),
        (
            {"kv": "c4", "kv_v": "q4", "recent": 32, "keep_tokens": "200"},
            "[evict] expected a format of single",
        ),
        ({"prefill": "lazy"}, "[prefill] expected eager beside --evict h2o"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(plain: Any, options: dict[str, Any], said: str) -> None:
    policy = options.get("evict", "h2o")
    with pytest.raises(ValueError, match=f"^{re.escape(said)}[^\n]*$"):
        evicting(plain, policy, **{name: value for name, value in options.items() if name != "evict"})


@pytest.mark.parametrize("policy", POLICIES)
def test_a_state_brings_its_masses(m: Any, policy: str) -> None:
    prompt, answer = text(m, policy)
    regions = {"recent": 20, "keep_tokens": "150", "n_ctx": 1024}
    s = evicting(m, policy, **regions)
    decoded(s, prompt, answer[:5])
    state, sequence = s.state_bytes(), s.seq_state_bytes(0)
    want = np.concatenate([s.decode([token]) for token in answer[5:]])
    other = evicting(m, policy, **regions)
    other.set_state(state)
    assert np.array_equal(np.concatenate([other.decode([token]) for token in answer[5:]]), want)
    several = evicting(m, policy, n_seq_max=3, **regions)
    several.decode(list(reversed(prompt)), seq=[1] * len(prompt))
    assert not several.set_seq_state(2, sequence)
    got = np.concatenate([several.decode([token], seq=[2]) for token in answer[5:]])
    assert distance(got, want) < EXACT


@pytest.mark.parametrize("policy", POLICIES)
def test_a_sequences_state_brings_its_own_count_of_tokens(m: Any, policy: str) -> None:
    """Which Keyformer's temperature depends on, whatever other sequences have."""
    prompt, answer = text(m, policy)
    options = {"recent": 20, "keep_tokens": "150", "n_ctx": 1024, "n_seq_max": 3}
    s = evicting(m, policy, **options)
    s.decode(prompt, output="none")
    s.decode(list(reversed(prompt)), seq=[2] * len(prompt), output="none")
    half = len(answer) // 2
    for token in answer[:half]:
        s.decode([token], output="none")
    other = evicting(m, policy, **options)
    assert not other.set_seq_state(1, s.seq_state_bytes(0))
    for token in answer[half:]:
        assert distance(other.decode([token], seq=[1]), s.decode([token])) < EXACT


def test_a_state_of_another_eviction_is_refused(plain: Any) -> None:
    states = {}
    for policy, keep in (("h2o", "100"), ("keyformer", "100"), ("h2o", "120"), ("none", "")):
        s = evicting(plain, policy, keep_tokens=keep)
        s.decode(tokens(plain, 50))
        states[policy, keep] = s.state_bytes()
    for policy, keep in states:
        for other, state in states.items():
            s = evicting(plain, policy, keep_tokens=keep)
            if other == (policy, keep):
                s.set_state(state)
                continue
            with pytest.raises(
                ValueError, match=r"^\[state\] expected --evict [^\n]*; use the same --evict and"
            ):
                s.set_state(state)
            assert s.n_cells_used() == 0
    cut = states["h2o", "100"]
    for size in range(8, len(cut), len(cut) // 40):
        with pytest.raises(ValueError, match=r"^\[state\]"):
            evicting(plain, "h2o").set_state(cut[:size])


def test_guesses_are_refused(plain: Any) -> None:
    with pytest.raises(
        ValueError, match=r"\[decode\] expected no guesses under eviction, .*; got 2; leave out"
    ):
        evicting(plain, "h2o").decode([1, 2, 3], guessed=[False, True, True])
