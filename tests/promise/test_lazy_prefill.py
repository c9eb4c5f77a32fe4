"""Lazy prefill: exact for the prompt, compressed behind it, whole or not at all, and counted."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import pytest
from runtime import distance, model, session, tokens

from latentkv import Llama
from latentkv.measure.perplexity import Cache, perplexity

N = 150
EXACT = 1e-5


@pytest.fixture(scope="module")
def path(converted: Any) -> Any:
    return converted("--method", "tale", "--outtype", "f32")


@pytest.fixture(scope="module")
def m(path: Any) -> Any:
    return model(path)


@pytest.fixture(scope="module")
def plain(converted: Any) -> Any:
    return model(converted("--method", "none", "--outtype", "f32"))


def test_the_prompt_sees_no_compression(m: Any, plain: Any) -> None:
    ids = tokens(plain, N)
    exact = session(plain, kv="f32").decode(ids, output="all")
    for kv in ("", "q4"):
        for n_ubatch in (512, 37):
            lazy = session(m, kv=kv, n_ubatch=n_ubatch)
            assert lazy.prefill == "lazy"
            assert distance(lazy.decode(ids, output="all"), exact) < EXACT
            assert lazy.n_cells_used() == N
    quantized = session(plain, kv="q2", prefill="lazy")
    assert distance(quantized.decode(ids, output="all"), exact) < EXACT
    assert distance(session(plain, kv="q2").decode(ids, output="all"), exact) > 1e-2


def test_outputs_are_those_that_were_asked_for(m: Any) -> None:
    ids = tokens(m, N)
    every = session(m).decode(ids, output="all")
    flags = [i % 7 == 3 for i in range(N)]
    assert distance(session(m, n_ubatch=40).decode(ids, output=flags), every[np.flatnonzero(flags)]) < EXACT
    assert distance(session(m).decode(ids), every[-1:]) < EXACT
    assert session(m).decode(ids, output="none").shape[0] == 0


def test_sequences_that_start_together_do_not_see_each_other(m: Any) -> None:
    ids = tokens(m, N)
    lengths = (N, 61, 7)
    batch = session(m, n_seq_max=3, n_ubatch=64)
    together = batch.decode(
        [i for n in lengths for i in ids[-n:]],
        seq=[s for s, n in enumerate(lengths) for _ in range(n)],
        output="all",
    )
    first = 0
    for n in lengths:
        assert distance(together[first : first + n], session(m).decode(ids[-n:], output="all")) < EXACT
        first += n


def test_a_sequence_that_goes_on_beside_one_that_starts_sees_its_past(m: Any) -> None:
    ids = tokens(m, N)
    alone, beside = (session(m, kv="f32", n_seq_max=2) for _ in range(2))
    for s in (alone, beside):
        s.decode(ids[:80], seq=[1] * 80, output="none")
    want = alone.decode(ids[80:], seq=[1] * (N - 80), output="all")
    got = beside.decode([*ids[:40], *ids[80:]], seq=[0] * 40 + [1] * (N - 80), output="all")
    assert distance(got[40:], want) < EXACT


def test_later_calls_see_the_compressed_past(m: Any) -> None:
    ids = tokens(m, N)
    exact = session(m).decode(ids, output="all")
    error = {}
    for prefill in ("lazy", "eager"):
        s = session(m, sink=0, recent=0, prefill=prefill)
        s.decode(ids[:100], output="none")
        error[prefill] = distance(s.decode(ids[100:], output="all"), exact[100:])
    assert 1e-3 < error["lazy"] < error["eager"]


def test_an_interrupted_prompt_leaves_nothing(m: Any) -> None:
    class Stop(Exception):
        pass

    def stop(number: int, frame: Any) -> None:
        raise Stop

    ids = tokens(m, 400)
    s = session(m, n_ubatch=1)
    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Stop):
            s.decode(ids)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert s.n_cells_used() == 0
    assert distance(s.decode(ids[:50]), session(m).decode(ids[:50])) < EXACT


def test_its_peak_is_one_layer_and_forecast(m: Any) -> None:
    n = 500
    width = m.n_head_kv * m.head_dim
    rows = 512 * (2 * width * 4 + 12)  # whole tiles of f32 K and V, a position and a mask
    for options in ({}, {"n_ubatch": 64}, {"sink": 0, "recent": 0}):
        forecast = m.forecast(n, **options)
        s = session(m, n_ctx=n, **options)
        assert s.prefill_bytes() == 0
        s.decode(tokens(m, n), output="last")
        assert s.prefill_bytes() == forecast["prefill"] == rows + n * m.n_embd * 4
        assert s.compute_bytes() <= forecast["compute"]
    assert m.forecast(n, prefill="eager")["prefill"] == 0


def test_where_nothing_exact_is_left_it_is_refused(converted: Any) -> None:
    cut = model(converted("--method", "palu", "--keep", "0.5", "--group", "2", "--outtype", "f32"))
    with pytest.raises(
        ValueError, match=r"^\[prefill\] expected eager, as layer \d+ has \d+ of \d+ dimensions"
    ):
        session(cut, prefill="lazy")
    with pytest.raises(ValueError, match=r"^\[prefill\] expected eager or lazy; got 'none'"):
        session(cut, prefill="none")


def test_llama_prefills_a_prompt_at_once_and_anew(path: Any) -> None:
    with Llama(str(path), n_ctx=512, n_batch=32, n_threads=1, logits_all=True) as llm:
        text = llm.tokenize(b"The cache holds what the model has read. " * 16)
        llm.eval(text)
        exact = np.array(llm.scores)
    with Llama(str(path), n_ctx=512, n_batch=32, n_threads=1) as llm:
        llm.eval(text[:100])
        assert distance(llm.logits, exact[99]) < EXACT
        other = [*text[:60], *text[:20]]
        assert llm.reuse_prefix(other) == 0  # a rewind starts over
        llm.eval(text[:60])
        assert distance(llm.logits, exact[59]) < EXACT
        assert llm.reuse_prefix([*text[:60], 5]) == 60  # what only grows is kept


def test_perplexity_is_measured_through_the_cache(m: Any, plain: Any) -> None:
    text = m.detokenize(tokens(m, 400)).decode(errors="replace")
    options = {"kv": "q2", "kv_recent": "q2", "sink": 0, "recent": 16, "n_threads": 1}
    common = {"n_ctx": 128, "chunks": 2, "decode": True}
    against = Cache(plain, {"kv": "f32", "n_threads": 1})
    kld = {}
    for prefill in ("", "lazy"):
        result = perplexity(Cache(m, options | {"prefill": prefill}), text, against=against, **common)
        assert result["prefill"] == (prefill or "eager")
        kld[prefill] = result["kld"]["mean"]
    assert 1e-4 < kld["lazy"] < kld[""]
    slices = perplexity(Cache(m, options), text, against=against, n_ctx=128, chunks=2)
    assert slices["kld"]["mean"] > 1e-4  # the file's lazy prefill does not flatter it
    with pytest.raises(ValueError, match=r"^\[--prefill\] expected eager, or --decode; got lazy"):
        perplexity(Cache(m, {"prefill": "lazy"}), text, n_ctx=128)
