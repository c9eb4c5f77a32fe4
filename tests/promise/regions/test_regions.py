"""Sink, recent and middle: who is where, in which format, at which cost."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from runtime import distance, model, session, tokens

from latentkv import Llama
from latentkv.engine.sequences import Sequences

N = 150
BATCH = 32  # tokens leave the recent window in batches


@pytest.fixture(scope="module")
def m(converted: Any) -> Any:
    return model(converted("--method", "palu", "--keep", "0.5", "--group", "2", "--outtype", "f32"))


def used(s: Any) -> dict[str, int]:
    return {region["name"]: region["used"] for region in s.kv_bytes()["regions"]}


@pytest.mark.parametrize(
    ("sink", "recent", "ratio"), [(4, -1, 0.1), (0, -1, 0.25), (4, 24, 0.3), (4, 24, -1.0), (4, -1, 1.0)]
)
def test_every_token_is_in_one_region_and_the_window_grows(
    m: Any, sink: int, recent: int, ratio: float
) -> None:
    s = session(m, kv="q4", sink=sink, recent=recent, recent_ratio=ratio, fixed_window=True)
    for length, token in enumerate(tokens(m, 400), start=1):
        s.decode([token], output="none")
        held = used(s)
        assert sum(held.values()) == length
        assert held.get("sink", 0) == min(sink, length)
        behind = length - min(sink, length)
        window = max(recent, math.ceil(max(0.0, ratio) * behind - 1e-3))
        assert min(window, behind) <= held["recent"] < window + BATCH
    assert ratio == 1.0 or held["middle"] > 0


@pytest.mark.parametrize(("sink", "recent", "ratio"), [(16, -1, 0.25), (0, -1, 0.25), (40, 24, 0.3)])
def test_who_goes_on_from_a_prefix_has_the_window_of_the_regions(
    converted: Any, sink: int, recent: int, ratio: float
) -> None:
    """Llama and the engine forget as many tokens of a prefix as the cache would keep exact at its end."""
    options: dict[str, Any] = {"kv": "q4", "sink": sink, "recent": recent, "recent_ratio": ratio}
    path = converted("--method", "none", "--outtype", "f32")
    plain = model(path)
    s, ids = session(plain, **options), tokens(plain, 300)
    s.decode(ids, output="none")
    for length in (1, 50, 150, 300):
        behind = max(0, length - sink)
        assert s.n_recent(length) == max(recent, math.ceil(ratio * behind - 1e-3))
    assert s.n_recent(300) <= used(s)["recent"] < s.n_recent(300) + BATCH
    prompt = [*ids[:150], ids[150] + 1]
    left = 150 - s.n_recent(150)
    assert Sequences(s, None, None).worth(ids, prompt) == left
    with Llama(str(path), n_ctx=512, n_threads=1, **options) as llm:
        llm.eval(ids)
        assert llm.reuse_prefix(prompt) == left
    forecast = plain.forecast(512, **options)
    assert (forecast["sink"], forecast["recent"]) == (sink, max(0, recent))
    assert forecast["recent_ratio"] == ratio


def test_a_prompt_and_its_tokens_one_by_one_end_alike(m: Any) -> None:
    """Whatever the ubatches, what has left the window by the end is compressed once and bounded."""
    ids = tokens(m, 300)
    for n_ubatch in (1, 64, 128):
        s = session(m, kv="q4", sink=4, recent_ratio=0.2, n_ubatch=n_ubatch)
        s.decode(ids, output="none")
        assert 60 <= used(s)["recent"] < 60 + BATCH


def test_sequences_have_windows_of_their_own(m: Any) -> None:
    ids = tokens(m, 200)
    s = session(m, kv="q4", sink=4, recent_ratio=0.25, n_seq_max=2, n_ctx=512)
    for i, token in enumerate(ids):
        short = [1] if i < 60 else []
        s.decode([token] * (1 + len(short)), seq=[0, *short], output="none")
    assert used(s)["sink"] == 8
    first, second = math.ceil(0.25 * 196), 14
    assert first + second <= used(s)["recent"] < first + second + 2 * BATCH


def test_guesses_in_several_ubatches_push_nothing_out(m: Any) -> None:
    options: dict[str, Any] = {"kv": "q4", "sink": 4, "recent": 24, "n_ubatch": 4, "fixed_window": True}
    plain, guessing = (session(m, **options) for _ in range(2))
    for at, token in enumerate(tokens(m, N)):
        plain.decode([token], output="none")
        guessing.decode([token, *range(1, 8)], output="none", guessed=[0] + [1] * 7)
        assert guessing.seq_rm(0, at + 1, -1)
        assert used(guessing) == used(plain)


def test_one_format_everywhere_is_no_regions(m: Any) -> None:
    ids = tokens(m, N)
    expected = session(m, kv="f32").decode(ids, output="all")
    split = session(m, kv="f32", kv_sink="f32", kv_recent="f32", sink=4, recent=20)
    assert distance(np.concatenate([split.decode([i]) for i in ids]), expected) < 1e-5
    coarse = session(m, kv="f32", kv_sink="f32", kv_recent="q2", sink=4, recent=20)
    assert distance(np.concatenate([coarse.decode([i]) for i in ids]), expected) > 1e-3


def test_regions_of_other_bits_are_read_as_they_are_stored(converted: Any) -> None:
    plain = model(converted("--method", "none", "--outtype", "f32"))
    ids = tokens(plain, 90)
    options: dict[str, Any] = {"kv": "q2", "kv_recent": "q4", "sink": 0, "recent": 40, "fixed_window": True}
    fused, reference = (session(plain, implementation=each, **options) for each in ("fused", "reference"))
    fused.decode(ids[:-1], output="none")
    reference.set_state(fused.state_bytes())
    assert distance(fused.decode(ids[-1:]), reference.decode(ids[-1:])) < 1e-2


def test_regions_have_their_own_bytes(m: Any) -> None:
    def row_bytes(**options: Any) -> dict[str, float]:
        regions = session(m, sink=4, recent=32, **options).kv_bytes()["regions"]
        return {r["name"]: (r["k"] + r["v"]) / r["slots"] for r in regions}

    alone = {name: session(m, kv=name).kv_bytes()["per_token"] - 12 for name in ("f16", "q8", "q4", "q2")}
    assert row_bytes(kv="q2") == {"sink": alone["f16"], "recent": alone["f16"], "middle": alone["q2"]}
    got = row_bytes(kv="q2", kv_recent="q4", kv_sink="q8")
    assert got == {"sink": alone["q8"], "recent": alone["q4"], "middle": alone["q2"]}
    # f16 rows behind f32 ones would be a loss that no one asked for
    assert set(row_bytes(kv="f32").values()) == {2 * alone["f16"]}
    assert row_bytes(kv="f32", kv_recent="q4")["recent"] == alone["q4"]
    mixed = session(m, kv="q2", kv_recent="q4", recent_ratio=0.25).kv_bytes()["per_token"] - 12
    assert mixed == pytest.approx(0.75 * alone["q2"] + 0.25 * alone["q4"], abs=1e-9)
    forecast = m.forecast(512, kv="q2", kv_recent="q4", recent_ratio=0.25)
    assert forecast["per_token"] == mixed + 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_recent": "q7"}, r"^\[kv_recent\] expected one of f16"),
        ({"kv_sink": "none"}, r"^\[kv_sink\] expected one of f16"),
        ({"recent_ratio": 1.5}, r"^\[recent_ratio\] expected a ratio from 0 to 1; got 1.5"),
        ({"recent_ratio": float("nan")}, r"^\[recent_ratio\] expected a ratio from 0 to 1; got -?nan"),
    ],
)
def test_bad_regions_are_refused(m: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        session(m, **options)
