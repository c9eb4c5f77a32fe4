"""K in blocks of 32 tokens, a scale for every channel: whole blocks, shared, broken, saved, and equal to the
reference."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import Any

import numpy as np
import pytest
from runtime import distance, model, session, tokens

N = 300
BLOCK = 32
KV: dict[str, Any] = {"kv_k": "c4", "kv_v": "q4", "sink": 4, "recent": 40, "fixed_window": True}


@pytest.fixture(scope="module")
def plain(converted: Any) -> Any:
    return model(converted("--method", "none", "--outtype", "f32"))


@pytest.fixture(scope="module")
def latent(converted: Any) -> Any:
    return model(converted("--method", "palu", "--keep", "0.5", "--group", "2", "--outtype", "f32"))


@pytest.fixture(params=["plain", "latent", "rotated"])
def m(request: pytest.FixtureRequest, converted: Any) -> Any:
    if request.param == "rotated":
        return model(converted("--method", "zack", "--keep", "0.5", "--outtype", "f32"))
    return request.getfixturevalue(request.param)


def used(s: Any) -> dict[str, int]:
    return {region["name"]: region["used"] for region in s.kv_bytes()["regions"]}


def one_by_one(s: Any, ids: list[int], seq: int = 0) -> Any:
    return np.concatenate([s.decode([token], seq=[seq]) for token in ids])


@pytest.mark.parametrize(
    ("sink", "recent", "ratio"), [(4, 32, -1.0), (0, 1, -1.0), (4, -1, 0.2), (4, 24, 0.3), (4, -1, 1.0)]
)
def test_tokens_leave_the_window_in_whole_blocks(plain: Any, sink: int, recent: int, ratio: float) -> None:
    window: dict[str, Any] = {"sink": sink, "recent": recent, "recent_ratio": ratio, "fixed_window": True}
    s = session(plain, kv_k="c2", kv_v="q2", **window)
    for length, token in enumerate(tokens(plain, 400), start=1):
        s.decode([token], output="none")
        held = used(s)
        assert sum(held.values()) == length
        behind = length - held.get("sink", 0)
        n = max(recent, int(np.ceil(max(0.0, ratio) * behind - 1e-3)))
        assert min(n, behind) <= held["recent"] < n + BLOCK
        assert held["middle"] % BLOCK == 0
    assert ratio == 1.0 or held["middle"] > 0


@pytest.mark.parametrize("kv_k", ["c8", "c4", "c3", "c2"])
def test_bytes_are_the_advertised_ones(m: Any, kv_k: str) -> None:
    bits = int(kv_k[1])
    options = KV | {"kv_k": kv_k}
    s = session(m, n_ctx=1024, **options)
    row = sum(
        (width * bits // 8 + width // 8 + 3) // 4 * 4
        for layer in m.layers
        for segments in layer["k"]["segments"]
        for width in segments
    )
    middle = s.kv_bytes()["regions"][-1]
    assert (middle["name"], middle["k"]) == ("middle", middle["slots"] * row)
    allocated = s.kv_bytes()
    forecast = m.forecast(1024, **options)
    assert {key: forecast[key] for key in allocated} == allocated


@pytest.mark.parametrize("kv_k", ["c8", "c2"])
def test_fused_equals_the_reference_expression_while_tokens_leave(m: Any, kv_k: str) -> None:
    """Later layers differ by roundings that flip a code; the first writes the same bytes."""
    options = KV | {"kv_k": kv_k}
    ids = tokens(m, 40 + 4 + 3 * BLOCK + 5)
    fused, stock = (
        one_by_one(session(m, implementation=name, **options), ids) for name in ("fused", "reference")
    )
    assert distance(fused, stock) < {"c8": 5e-3}.get(kv_k, 3e-2)
    exact = session(m, kv="f32").decode(ids, output="all")
    assert distance(fused, exact) > 1e-4


def test_decode_equals_chunks(m: Any) -> None:
    """Blocks hold the same tokens whatever the ubatches; only what a query finds recent differs."""
    ids = tokens(m, N)
    held = []
    for n_ubatch in (1, 37):
        s = session(m, n_ubatch=n_ubatch, **KV)
        s.decode(ids, output="none")
        held.append(s.decode([9]))
        assert used(s) == {"sink": 4, "recent": 41, "middle": 256}
    assert distance(held[1], held[0]) < 3e-2


def test_more_bits_are_closer(plain: Any) -> None:
    ids = tokens(plain, 200)
    exact = session(plain, kv="f32").decode(ids, output="all")
    error = [
        distance(one_by_one(session(plain, **(KV | {"kv_k": k, "kv_v": "f16"})), ids), exact)
        for k in ("f16", "c8", "c4", "c2")
    ]
    assert error == sorted(error)
    assert error[3] > 4 * error[1]


def test_a_prompt_prefilled_lazily_fills_the_same_blocks(plain: Any) -> None:
    """The prompt sees exact keys; what follows sees blocks made of them, whatever the ubatches."""
    ids = tokens(plain, N)
    exact = session(plain, kv="f32").decode(ids, output="all")
    after = []
    for n_ubatch in (512, 37):
        s = session(plain, prefill="lazy", n_ubatch=n_ubatch, n_seq_max=2, **KV)
        seq = [0] * 200 + [1] * 100
        got = s.decode(ids[:200] + ids[:100], seq=seq, output="all")
        assert distance(got[:200], exact[:200]) < 1e-5
        assert distance(got[200:], exact[:100]) < 1e-5
        # 196 and 96 tokens behind the sinks: 4 and 1 whole blocks are older than the window
        assert used(s) == {"sink": 8, "recent": 68 + 64, "middle": 128 + 32}
        after.append(one_by_one(s, ids[200:260]))
    assert distance(after[1], after[0]) < 1e-4
    error = distance(after[0], exact[200:260])
    assert 1e-4 < error < 0.1
    forecast = plain.forecast(512, prefill="lazy", **KV)
    assert forecast["prefill"] > plain.forecast(512, prefill="lazy", kv="q4")["prefill"]


def test_interleaved_prompts_are_kept_apart(plain: Any) -> None:
    ids = tokens(plain, 150)
    other = ids[::-1]
    alone = session(plain, prefill="lazy", **KV)
    alone.decode(ids, output="none")
    both = session(plain, prefill="lazy", n_seq_max=2, n_ubatch=41, **KV)
    both.decode(
        [i for pair in zip(ids, other, strict=True) for i in pair], seq=[0, 1] * len(ids), output="none"
    )
    assert used(both)["middle"] == 2 * used(alone)["middle"] > 0
    assert distance(one_by_one(both, ids[:20]), one_by_one(alone, ids[:20])) < 1e-4


def test_a_broken_block_is_masked_and_takes_no_room_from_others(plain: Any) -> None:
    ids = tokens(plain, N)
    s = session(plain, n_ctx=256, **(KV | {"sink": 0}))
    s.decode(ids[:200], output="none")
    assert used(s) == {"recent": 40, "middle": 160}
    s.seq_rm(0, 100, -1)  # block 3 holds 96 to 127
    assert used(s) == {"recent": 0, "middle": 100}
    with pytest.raises(ValueError, match=r"^\[context\] expected at most 256 cells; got 257"):
        s.decode(ids[100:257], output="none")
    got = s.decode(ids[100:256], output="all")
    assert used(s)["middle"] == 100 + 96
    exact = session(plain, kv="f32").decode(ids[:256], output="all")[100:]
    assert distance(got, exact) < 0.1
    s.seq_rm(0, 96, 100)
    assert used(s)["middle"] == 192
    s.seq_rm(0, 0, -1)
    s.decode(ids[:256], output="none")
    assert sum(used(s).values()) == 256


def test_broken_blocks_are_brought_together_where_there_is_no_other_room(plain: Any) -> None:
    """Their tokens are coded again, and lose little: V keeps its bytes."""
    ids = tokens(plain, 256)
    options = KV | {"sink": 0, "recent": 1, "kv_k": "c8", "kv_v": "f16"}
    s, fresh = (session(plain, n_ctx=256, **options) for _ in range(2))
    exact = session(plain, kv="f32")
    at = 20
    while at < 200:  # 8 of 12 blocks are broken
        for one in (s, exact):
            one.decode(ids[one.seq_pos_max(0) + 1 : min(at + 45, 256)], output="none")
            one.seq_rm(0, at, -1)
        at += 20
    s.decode(ids[at - 20 : -1], output="none")
    exact.decode(ids[at - 20 : -1], output="none")
    assert s.n_cells_used() == 255
    assert s.kv_bytes() | {"regions": ()} == fresh.kv_bytes() | {"regions": ()}
    assert distance(s.decode([9]), exact.decode([9])) < 0.02


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("kv", [("c4", "q4", 4, 32), ("c3", "q3", 0, 1), ("c2", "q3", 4, 48)])
def test_blocks_take_every_context_that_f16_takes(latent: Any, kv: tuple[Any, ...], seed: int) -> None:
    """Random operations on sequences, and states that come back."""
    random = Random(seed)
    options: dict[str, Any] = dict(zip(("kv_k", "kv_v", "sink", "recent"), kv, strict=True))
    ids = tokens(latent, 256)
    blocks = session(latent, n_ctx=230, n_seq_max=3, **options)
    f16 = session(latent, n_ctx=230, n_seq_max=3, kv="f16")
    taken = 0
    for _ in range(250):
        s, other = random.sample(range(3), 2)
        length = f16.seq_pos_max(s) + 1
        at = random.randrange(length + 1)
        verb = random.choice(["decode"] * 6 + ["tail", "tail", "hole", "copy", "shift", "whole", "one"])
        if verb == "decode":
            new = ids[length : length + random.choice((1, 3, 20, 60))]
            try:
                f16.require_room(len(new))
            except ValueError:
                continue
            f16.decode(new, seq=[s] * len(new), output="none")
            blocks.decode(new, seq=[s] * len(new), output="none")
            taken += 1
        for one in (f16, blocks):
            if verb == "tail":
                assert one.seq_rm(s, at, -1)
            elif verb == "hole":
                assert one.seq_rm(s, at, at + 9)
            elif verb == "copy":
                one.seq_rm(other)
                one.seq_cp(s, other, 0, at)
            elif verb == "shift":
                one.seq_keep(s)
                one.seq_rm(s, at, at + 40)
                one.seq_add(s, at + 40, -1, -40)
            elif verb == "whole":
                one.set_state(one.state_bytes())
            elif verb == "one":
                state = one.seq_state_bytes(s)
                one.seq_rm(s)
                with suppress(
                    ValueError
                ):  # alone it shares no cells: the sequence is gone where it has no room
                    one.set_seq_state(s, state, accept="any")
        assert blocks.n_cells_used() == f16.n_cells_used()
        assert [blocks.seq_pos_max(i) for i in range(3)] == [f16.seq_pos_max(i) for i in range(3)]
    assert taken > 60
    blocks.seq_keep(0)
    blocks.seq_rm(0, 100, -1)
    assert np.isfinite(blocks.decode([9])).all()


def test_a_copy_shares_blocks(plain: Any) -> None:
    """Tokens that two sequences hold leave the window when both are past it, in blocks of the first."""
    ids = tokens(plain, 280)
    alone = session(plain, **KV)
    alone.decode(ids[:200], output="none")
    expected = one_by_one(alone, ids[200:])
    s = session(plain, n_seq_max=2, **KV)
    s.decode(ids[:200], output="none")
    s.seq_cp(0, 1)
    assert s.n_cells_used() == 200
    both = [s.decode([token, token], seq=[0, 1], output="all") for token in ids[200:]]
    first, second = (np.stack([rows[i] for rows in both]) for i in (0, 1))
    assert distance(first, expected) < 2e-3
    assert distance(second, expected) < 2e-2
    assert used(s)["middle"] % BLOCK == 0
    assert used(s)["middle"] > used(alone)["middle"]
    s.seq_rm(0)
    assert distance(s.decode([9], seq=[1]), alone.decode([9])) < 2e-2
    s.seq_rm(1)
    assert s.n_cells_used() == 0


def test_shift_where_rows_carry_no_position(latent: Any) -> None:
    ids = tokens(latent, 200)
    moved, still = session(latent, **KV), session(latent, **KV)
    moved.decode(ids, pos=[0, 1, 2, 3, *range(54, 250)], output="none")
    moved.seq_add(0, 54, -1, -50)
    still.decode(ids, output="none")
    assert used(moved) == used(still)
    assert distance(moved.decode([9]), still.decode([9])) < 0.05


def test_state_comes_back_bit_for_bit(m: Any) -> None:
    s = session(m, **KV)
    s.decode(tokens(m, 200), output="none")
    s.seq_rm(0, 50, 60)  # a hole in a block
    data = s.state_bytes()
    expected = one_by_one(s, tokens(m, 60))
    other = session(m, **KV)
    other.set_state(data)
    assert other.state_bytes() == data
    assert np.array_equal(one_by_one(other, tokens(m, 60)), expected)
    for cut in (40, len(data) // 2, len(data) - 1):
        broken = session(m, **KV)
        with pytest.raises(ValueError, match=r"^\[state\] expected"):
            broken.set_state(data[:cut])
        assert broken.n_cells_used() == 0
    with pytest.raises(ValueError, match=r"^\[state\] expected"):
        session(m, **(KV | {"kv_k": "c3"})).set_state(data)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_k": "c4"}, r"^\[recent\] expected recent tokens, --recent 1 or more"),
        ({"kv": "c4", "recent": 32}, r"^\[kv v\] expected a format of single tokens for V; .*got c4"),
        ({"kv_recent": "c4", "recent": 32}, r"^\[kv_recent\] expected a format of single tokens, as q4"),
        ({"kv_sink": "c2", "sink": 4}, r"^\[kv_sink\] expected a format of single tokens, as q2"),
    ],
)
def test_blocks_where_they_cannot_be_are_refused(plain: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        session(plain, **options)


def test_recent_tokens_are_never_coarser(plain: Any) -> None:
    regions = session(plain, **(KV | {"kv_k": "c8"})).kv_bytes()["regions"]
    rows = {r["name"]: r["k"] / r["slots"] for r in regions}
    f16 = session(plain, kv="f16").kv_bytes()
    assert rows["recent"] == rows["sink"] == f16["k"] / 512


def test_a_wide_channel_of_k_is_why(plain: Any) -> None:
    """The demo's keys per token and per channel in 2 bits, without the rotation that hides the width."""
    ids = tokens(plain, 200)
    exact = session(plain, kv="f32").decode(ids, output="all")
    error = {
        k: distance(
            one_by_one(
                session(plain, kv_k=k, kv_v="f16", sink=4, recent=32, kv_rotate=False, fixed_window=True), ids
            ),
            exact,
        )
        for k in ("q2", "c2")
    }
    assert error["c2"] < 0.85 * error["q2"]
