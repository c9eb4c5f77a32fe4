"""The order in which tokens arrive, their neighbours, their slots, a trip through a file: nothing changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runtime import distance, model, session, tokens

N = 150
EXACT = 1e-5  # f32 rows: only the order of f32 sums differs


@pytest.fixture(scope="module", params=["plain", "latent"])
def m(request: pytest.FixtureRequest, converted: Any) -> Any:
    if request.param == "plain":
        return model(converted("--method", "none", "--outtype", "f32"))
    return model(converted("--method", "palu", "--keep", "0.5", "--group", "2", "--outtype", "f32"))


@pytest.fixture(scope="module")
def latent(converted: Any) -> Any:
    return model(converted("--method", "palu", "--keep", "0.5", "--group", "2", "--outtype", "f32"))


def whole(m: Any, ids: list[int], **options: Any) -> Any:
    return session(m, **({"kv": "f32"} | options)).decode(ids, output="all")


def test_decode_equals_prefill_equals_chunks(m: Any) -> None:
    ids = tokens(m, N)
    expected = whole(m, ids)
    for n_ubatch in (1, 37, 64):
        assert distance(whole(m, ids, n_ubatch=n_ubatch), expected) < EXACT
    step_by_step = session(m, kv="f32")
    assert distance(np.concatenate([step_by_step.decode([i]) for i in ids]), expected) < EXACT
    # a missing token shows
    assert distance(whole(m, [*ids[:10], ids[12], *ids[11:]][:N]), expected) > 1e-3


@pytest.mark.parametrize("kv", ["q4", "q2", "n4"])
def test_quantized_decode_equals_prefill(m: Any, kv: str) -> None:
    """Rows are quantized from the same vectors whatever the batch. The order of sums differs, and
    a query meets codes as bytes where few see a tile, in full where many do.

    Where such a sum lies at the edge of two codes, later layers flip more of them. How many windows that
    moves depends on the machine's matrix products: of 40 tokens one in seven on one, four on another, where
    of 10 tokens it is four in 28. One wrong token moves every window by more than the quantization error.
    """
    ratios, wrong = [], []
    text = tokens(m, 28 * 10)
    for begin in range(0, len(text), 10):
        ids = text[begin : begin + 10]
        quantized = whole(m, ids, kv=kv)
        error = distance(whole(m, ids), quantized)
        step_by_step = session(m, kv=kv)
        got = np.concatenate([step_by_step.decode([i]) for i in ids])
        ratios.append(distance(got, quantized) / error)
        wrong.append(distance(whole(m, [*ids[:4], ids[5], *ids[5:]], kv=kv), quantized) / error)
    assert np.median(ratios) < 0.25
    assert min(wrong) > 1.0


def test_sequences_do_not_see_each_other(m: Any) -> None:
    ids = tokens(m, N)
    lengths = (N, 61, 7)
    batch = session(m, kv="f32", n_seq_max=3)
    together = batch.decode(
        [i for n in lengths for i in ids[-n:]],
        seq=[s for s, n in enumerate(lengths) for _ in range(n)],
        output="all",
    )
    first = 0
    for n in lengths:
        assert distance(together[first : first + n], whole(m, ids[-n:])) < EXACT
        first += n
    # and one token each, interleaved
    more = batch.decode([5, 6, 7], seq=[2, 0, 1], output="all")
    for row, (s, token) in zip(more, ((2, 5), (0, 6), (1, 7)), strict=True):
        alone = whole(m, [*ids[-lengths[s] :], token])[-1]
        assert distance(row, alone) < EXACT


def test_slots_in_any_order(m: Any) -> None:
    """Removing a sequence leaves holes; the next one fills them and reads the same."""
    ids = tokens(m, N)
    s = session(m, kv="f32", n_seq_max=2)
    for i in range(40):
        s.decode([ids[i], ids[i]], seq=[0, 1], output="none")
    s.seq_rm(0)
    assert s.n_cells_used() == 40
    assert distance(s.decode(ids, seq=[0] * N, output="all"), whole(m, ids)) < EXACT


def test_copy_keep_remove(m: Any) -> None:
    ids = tokens(m, N)
    s = session(m, kv="f32", n_seq_max=3)
    s.decode(ids[:100], output="none")
    s.seq_cp(0, 2)
    assert s.n_cells_used() == 100  # shared, not copied
    s.seq_rm(0, 50, -1)
    assert (s.seq_pos_max(0), s.seq_pos_max(2), s.seq_pos_max(1)) == (49, 99, -1)
    assert distance(s.decode([ids[100]], seq=[2]), whole(m, ids[:101])[-1:]) < EXACT
    assert distance(s.decode([ids[50]], seq=[0]), whole(m, ids[:51])[-1:]) < EXACT
    s.seq_keep(2)
    assert (s.seq_pos_max(0), s.n_cells_used()) == (-1, 101)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sink": 4, "recent": 64},
        {"recent_ratio": 0.1},
        {"evict": "h2o", "keep_tokens": "160", "recent": 32},
        {"n_seq_max": 3, "recent": 32},
    ],
    ids=str,
)
def test_a_token_costs_the_host_no_more_in_a_long_context(m: Any, options: dict[str, Any]) -> None:
    """Cells that the host looks at for each decoded token and the questions that go with it."""
    visited = []
    for depth in (400, 3200):
        s = session(m, kv="q4", n_ctx=4096, **options)
        n_seq = options.get("n_seq_max", 1)
        for first in range(0, depth, 80):
            n = 80 // n_seq
            s.decode(tokens(m, n * n_seq), seq=[i // n for i in range(n * n_seq)], output="none")
            assert s.n_cells_used() <= first + 80
        before = s.n_cells_visited()
        for _ in range(96):
            s.decode([7] * n_seq, seq=list(range(n_seq)), output="none")
            assert all(s.seq_pos_max(i) >= 0 for i in range(n_seq))
        visited.append((s.n_cells_visited() - before) / (96 * n_seq))
    assert 0 < visited[1] <= 1.5 * visited[0] + 8
    before = s.n_cells_visited()
    s.state_bytes()  # looks at all of them
    assert s.n_cells_visited() - before >= 160


@pytest.mark.parametrize("kv", ["q4", "n4"])
def test_state_is_bit_exact(m: Any, kv: str) -> None:
    ids = tokens(m, N)
    s = session(m, kv=kv, sink=4, recent=32)
    s.decode(ids, output="none")
    data = s.state_bytes()
    expected = s.decode([9])
    other = session(m, kv=kv, sink=4, recent=32)
    other.set_state(data)
    assert np.array_equal(other.decode([9]), expected)
    with pytest.raises(ValueError, match=r"^\[state\] expected"):
        session(m, kv="q8").set_state(data)
    for cut in (0, 7, 8, 40, len(data) // 2, len(data) - 1):
        broken = session(m, kv=kv, sink=4, recent=32)
        with pytest.raises(ValueError, match=r"^\[state\] expected"):
            broken.set_state(data[:cut])
        assert broken.n_cells_used() == 0


@pytest.mark.parametrize("options", [{"kv": "f32"}, {"kv": "q4", "sink": 4, "recent": 32}], ids=str)
def test_one_sequence_travels_alone(m: Any, options: dict[str, Any]) -> None:
    ids = tokens(m, N)
    s = session(m, n_seq_max=3, **options)
    s.decode(ids[50:140], seq=[0] * 90, output="none")
    s.decode(ids[:100], seq=[1] * 100, output="none")
    s.seq_cp(1, 2, 0, 60)  # shared slots
    state = s.seq_state_bytes(1)
    expected = s.decode([ids[100]], seq=[1])
    other = session(m, n_seq_max=3, **options)
    other.decode(ids[30:60], seq=[2] * 30, output="none")
    other.decode(ids[70:80], seq=[0] * 10, output="none")  # is replaced
    before = other.seq_state_bytes(2)
    other.set_seq_state(0, state)
    assert [other.seq_pos_max(seq) for seq in range(3)] == [99, -1, 29]
    assert other.n_cells_used() == 130
    assert other.seq_state_bytes(2) == before
    # in other slots: sums have another order, codes are the same
    assert distance(other.decode([ids[100]], seq=[0]), expected) < EXACT


def test_a_sequence_that_finds_no_room_leaves_the_others(m: Any) -> None:
    ids = tokens(m, N)
    s = session(m, kv="f32", n_ctx=256, n_seq_max=2)
    s.decode(ids[:140], seq=[0] * 140, output="none")
    state = s.seq_state_bytes(0)
    with pytest.raises(ValueError, match=r"^\[state\] expected room for 140 tokens"):
        s.set_seq_state(1, state)
    assert (s.seq_pos_max(0), s.seq_pos_max(1), s.n_cells_used()) == (139, -1, 140)
    for cut in (0, 8, 24, len(state) // 2, len(state) - 1):
        with pytest.raises(ValueError, match=r"^\[state\] expected"):
            s.set_seq_state(1, state[:cut])
        assert (s.seq_pos_max(1), s.n_cells_used()) == (-1, 140)


SHARED: list[dict[str, Any]] = [
    {"kv": "f32"},
    {"kv": "q4", "sink": 4, "recent": 32},
    {"kv_k": "c4", "kv_v": "q4", "recent": 8},
]


@pytest.mark.parametrize("options", SHARED, ids=str)
def test_what_sequences_share_is_saved_once_and_shared_again(m: Any, options: dict[str, Any]) -> None:
    ids = tokens(m, N)

    def build(n_seq_max: int = 3) -> Any:
        return session(m, n_seq_max=n_seq_max, **options)

    s = build()
    s.decode(ids[:96], seq=[0] * 96, output="none")
    s.seq_cp(0, 1)
    s.seq_cp(0, 2)
    for seq in range(3):
        s.decode(ids[96 + seq : 104 + seq], seq=[seq] * 8, output="none")
    state = s.state_bytes()
    alone = [len(s.seq_state_bytes(seq)) for seq in range(3)]
    assert len(state) < 0.5 * sum(alone)
    other = build()
    other.set_state(state)
    assert other.n_cells_used() == s.n_cells_used() == 96 + 3 * 8
    assert other.state_bytes() == state
    step = {"tokens": ids[110:113], "seq": [0, 1, 2], "output": "all"}
    assert np.array_equal(other.decode(**step), s.decode(**step))
    for left in (0, 1):  # shared cells stay those of who is left
        assert other.seq_rm(left)
    assert other.n_cells_used() == 96 + 9
    with pytest.raises(ValueError, match=r"^\[state\] expected one sequence; got 3"):
        other.set_seq_state(1, state)
    with pytest.raises(ValueError, match=r"^\[state\] expected sequences below 2; got 2; raise n_seq_max"):
        build(2).set_state(state)


@pytest.mark.parametrize("options", SHARED, ids=str)
def test_a_state_is_the_same_whoever_saved_it(m: Any, options: dict[str, Any]) -> None:
    """All of a cache with one sequence, or that sequence: either replaces all, or a sequence."""
    ids = tokens(m, N)

    def build() -> Any:
        return session(m, n_seq_max=2, **options)

    s = build()
    s.decode(ids[:100], output="none")
    state, alone = s.state_bytes(), s.seq_state_bytes(0)
    assert state == alone
    expected = s.decode([ids[100]])
    other = build()
    other.decode(ids[30:60], seq=[0] * 30, output="none")
    other.set_seq_state(1, state)
    assert distance(other.decode([ids[100]], seq=[1]), expected) < EXACT
    other.set_state(alone)
    assert other.seq_pos_max(1) == -1
    assert np.array_equal(other.decode([ids[100]]), expected)


REGIONS: dict[str, Any] = {"sink": 4, "recent": 32, "fixed_window": True}


@pytest.mark.parametrize("regions", [{}, REGIONS], ids=["no window", "window"])
def test_a_sequence_in_finer_rows_is_coded_anew(latent: Any, regions: dict[str, Any]) -> None:
    ids = tokens(latent, N)

    def state(kv: str) -> bytes:
        s = session(latent, kv=kv, **regions)
        s.decode(ids, output="none")
        return bytes(s.seq_state_bytes(0))

    fine, coarse = state("q8"), state("q4")
    s = session(latent, kv="q4", **regions)
    with pytest.raises(ValueError, match=r"^\[state\] expected row bytes"):
        s.set_seq_state(0, fine)
    assert s.n_cells_used() == 0
    assert s.set_seq_state(0, fine, accept="finer")
    again = s.seq_state_bytes(0)
    assert len(again) == len(coarse) < len(fine)
    other = session(latent, kv="q4", **regions)
    assert not other.set_seq_state(0, again, accept="finer")  # nothing is coded twice
    assert other.seq_state_bytes(0) == again
    expected = session(latent, kv="f32", **regions)
    expected.decode(ids, output="none")
    want = expected.decode([9])
    assert distance(s.decode([9]), want) < 0.1
    with pytest.raises(ValueError, match=r"^\[state\] expected rows .* as fine as this session's or finer"):
        session(latent, kv="q8", **regions).set_seq_state(0, coarse, accept="finer")
    for cut in (24, 60, len(fine) // 2, len(fine) - 1):
        broken = session(latent, kv="q4", **regions)
        with pytest.raises(ValueError, match=r"^\[state\] expected"):
            broken.set_seq_state(0, fine[:cut], accept="finer")
        assert broken.n_cells_used() == 0


def test_dropped_channels_of_a_sequence_read_as_those_of_a_smaller_plan(latent: Any) -> None:
    """Between two plans of one file: what the smaller does not keep is not missed."""
    ids = tokens(latent, N)
    whole_plan = {
        f"{side}_plan": ["f32" for layer in latent.layers for group in layer[side]["segments"] for _ in group]
        for side in ("k", "v")
    }
    s = session(latent, **whole_plan)
    s.decode(ids, output="none")
    assert not session(latent, kv="f32").set_seq_state(0, s.seq_state_bytes(0), accept="finer")
    none = {"k_plan": whole_plan["k_plan"], "v_plan": ["none"] * len(whole_plan["v_plan"])}
    blind = session(latent, **none)
    assert blind.set_seq_state(0, s.seq_state_bytes(0), accept="finer")
    with pytest.raises(ValueError, match=r"^\[state\] expected rows .* or finer"):
        session(latent, **whole_plan).set_seq_state(0, blind.seq_state_bytes(0), accept="finer")


def test_rows_of_another_rotation_are_no_rows_of_this_session(converted: Any) -> None:
    """Full rows are rotated where they are quantized: the same layout holds other numbers."""
    m = model(converted("--method", "none", "--outtype", "f32"))
    s = session(m, kv="q8", kv_rotate=False)
    s.decode([5, 6, 7], output="none")
    said = r"^\[state\] expected full rows that are rotated as this session's"
    with pytest.raises(ValueError, match=said):
        session(m, kv="q8").set_state(s.state_bytes())
    with pytest.raises(ValueError, match=said):
        session(m, kv="q8").set_seq_state(0, s.seq_state_bytes(0), accept="finer")
    session(m, kv="q8", kv_rotate=False).set_state(s.state_bytes())
    assert session(m, kv="q4", kv_rotate=False).set_seq_state(0, s.seq_state_bytes(0), accept="finer")


def test_a_state_of_other_weights_is_refused(converted: Any, tmp_path: Path) -> None:
    """The same names, types, shapes and size: what differs is one number of a tensor."""
    path = Path(converted("--method", "none", "--outtype", "f32"))
    data = bytearray(path.read_bytes())
    data[-64:] = bytes(64)
    twin = tmp_path / "twin.gguf"
    twin.write_bytes(data)
    s = session(model(path), kv="q8")
    s.decode([5, 6, 7], output="none")
    with pytest.raises(
        ValueError, match=r"^\[state\] expected a state of .*twin.gguf; got one of another model"
    ):
        session(model(twin), kv="q8").set_state(s.state_bytes())
    same = tmp_path / "copy.gguf"
    same.write_bytes(path.read_bytes())
    session(model(same), kv="q8").set_state(s.state_bytes())


def test_shift_equals_recomputation_where_rows_carry_no_position(latent: Any) -> None:
    ids = tokens(latent, N)
    s = session(latent, kv="f32")
    s.decode(ids, pos=list(range(50, 50 + N)), output="none")
    s.seq_add(0, 0, -1, -50)
    assert (s.seq_pos_min(0), s.seq_pos_max(0)) == (0, N - 1)
    assert distance(s.decode([9]), whole(latent, [*ids, 9])[-1:]) < EXACT


def test_shift_is_refused_where_rows_carry_positions(converted: Any) -> None:
    plain = model(converted("--method", "none", "--outtype", "f32"))
    s = session(plain)
    s.decode(tokens(plain, 10), output="none")
    with pytest.raises(ValueError, match=r"^\[context shift\] expected K `rebuild`.*got full in layer 0"):
        s.seq_add(0, 0, -1, 5)


def test_exact_regions_help_and_are_counted(m: Any) -> None:
    ids = tokens(m, N)
    exact = whole(m, ids)
    errors = {}
    for sink, recent in ((0, 0), (4, 0), (4, 32), (0, N)):
        s = session(m, kv="q2", sink=sink, recent=recent)
        errors[sink, recent] = distance(np.concatenate([s.decode([i]) for i in ids]), exact)
        assert s.n_cells_used() == N
        names = [region["name"] for region in s.kv_bytes()["regions"]]
        assert names == [*(["sink"] if sink else []), *(["recent"] if recent else []), "middle"]
    # four tokens of 64 change the plain model's error by 0.1 %, less than rounding on another processor
    assert errors[4, 32] < errors[4, 0] < 1.01 * errors[0, 0]
    assert errors[0, N] < 1e-3  # everything is recent: f16 rows


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.decode([1] * 65), r"^\[context\] expected at most 64 cells; got 65; raise"),
        (lambda s: s.decode([999999]), r"^\[decode\] expected tokens from 0 to"),
        (lambda s: s.decode([-1]), r"^\[decode\] expected tokens from 0 to"),
        (lambda s: s.decode([1], seq=[5]), r"^\[sequence\] expected 0 to 0.*n_seq_max"),
        (lambda s: s.decode([1, 2], pos=[3, 3]), r"^\[decode\] expected a position above 3"),
        (lambda s: s.decode([1, 2], output=[True]), r"^\[decode\] expected one output flag"),
        (lambda s: s.decode([1], output="some"), r"^\[decode\] expected output"),
    ],
)
def test_bad_calls_are_refused_and_leave_the_cache_alone(latent: Any, call: Any, message: str) -> None:
    s = session(latent, n_ctx=64)
    with pytest.raises(ValueError, match=message):
        call(s)
    assert s.n_cells_used() == 0


@pytest.mark.parametrize("kv", ["q7", "none", "Q4", "g4"])
def test_unknown_format_is_refused(latent: Any, kv: str) -> None:
    with pytest.raises(ValueError, match=r"^\[kv\] expected one of f16"):
        session(latent, kv=kv)


@pytest.mark.parametrize("options", SHARED, ids=str)
def test_a_sequence_in_parts_is_the_sequence(m: Any, options: dict[str, Any]) -> None:
    """Also where its beginning is another sequence's, as far as rows have settled."""
    ids = tokens(m, N)

    def build() -> Any:
        return session(m, n_seq_max=3, **options)

    s = build()
    s.decode(ids[:140], seq=[0] * 140, output="none")
    settled = s.seq_settled(0)
    assert 140 - 72 <= settled <= 140 - options.get("recent", 0)
    assert (settled == 140) == ("recent" not in options)
    whole = s.seq_state_bytes(0)
    assert s.seq_state_parts(0, [0]) == [whole]
    parts = s.seq_state_parts(0, [0, 32, 64])
    assert len(parts) == 3
    assert sum(map(len, parts)) < 1.2 * len(whole)
    other = build()
    other.decode(ids[20:40], seq=[2] * 20, output="none")
    before = other.seq_state_bytes(2)
    other.set_seq_state(1, parts)
    assert (other.seq_pos_min(1), other.seq_pos_max(1)) == (0, 139)
    assert other.seq_state_bytes(2) == before
    wanted = s.decode([ids[140]], seq=[0])
    assert distance(other.decode([ids[140]], seq=[1]), wanted) < EXACT
    with pytest.raises(ValueError, match=r"^\[state\] expected"):
        other.set_seq_state(1, [*parts[:2], parts[2][:-1]])
    assert other.seq_pos_max(1) == -1
    assert other.seq_state_bytes(2) == before

    twin = build()  # begins with the same 64 tokens
    twin.decode([*ids[:64], *ids[100:150]], seq=[0] * 114, output="none")
    end = twin.seq_state_parts(0, [min(64, twin.seq_settled(0))])
    if twin.seq_settled(0) >= 64 <= settled:
        mixed = build()
        mixed.set_seq_state(0, [*parts[:2], *end])
        assert distance(mixed.decode([9], seq=[0]), twin.decode([9], seq=[0])) < 1e-3


def test_cuts_of_a_sequence(m: Any) -> None:
    s = session(m, kv="f32", evict="h2o", keep_tokens="100", sink=0, recent=0)
    s.decode(tokens(m, 120), output="none")
    assert s.seq_settled(0) == 0
    with pytest.raises(ValueError, match=r"^\[state\] expected at least one part, and under eviction one"):
        s.seq_state_parts(0, [0, 64])
    assert s.seq_state_parts(0, [0]) == [s.seq_state_bytes(0)]
    plain = session(m, kv="f32")
    plain.decode(tokens(m, 20), output="none")
    for cuts in ([], [8, 8], [9, 3], [-1]):
        with pytest.raises(ValueError, match=r"^\[state\] expected"):
            plain.seq_state_parts(0, cuts)
    with pytest.raises(ValueError, match=r"^\[state\] expected at least one part"):
        plain.set_seq_state(0, [])
