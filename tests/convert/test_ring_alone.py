"""Layers with a sliding window that keep no exact tokens: all of their rows are in the ring, whatever regions
their tokens live in. Other layers keep theirs as ever."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from both import core, distance, run, token_ids

from conftest import Tiny
from latentkv_convert import pipeline
from latentkv_convert.ir import Plan
from latentkv_convert.rows import exact as short
from latentkv_convert.rows.sizes import round_up
from latentkv_convert.schema import KEYS

N_CTX = 1024
N = 700
WINDOW = 48  # gemma3_text's TINY, in layers 0 and 2
UBATCH = 32
SLOTS = 128  # WINDOW + UBATCH, in whole tiles of 64
IDS = token_ids(N)
EXACT = 1e-4  # f32 rows: only the order of f32 sums differs, over three layers of random weights
CALIBRATED = ("--calib-tokens", "1024", "--fisher-tokens", "512", "--calib-window", "128")
FILES: dict[str, tuple[str, ...]] = {
    "plain": ("--method", "none"),
    "palu": ("--method", "palu", "--keep", "0.5", *CALIBRATED),
    "zack": ("--method", "zack", "--keep", "0.5", *CALIBRATED),
    "waterfill": ("--kv-budget", "40%", "--sink", "4", "--recent", "32", *CALIBRATED),
    "rebuild": ("--kv-budget", "40%", "--sink", "4", "--recent", "32", "--prefer", "size", *CALIBRATED),
}
LAYERS = [False, True, False]  # which keep exact tokens


@pytest.fixture(scope="module")
def gemma(random_checkpoint: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("gemma"), "gemma3_text", max_position_embeddings=N_CTX)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calib") / "calib.txt"
    path.write_bytes(bytes(np.random.default_rng(5).integers(32, 127, 6000, dtype=np.uint8)))
    return path


@contextmanager
def said(exact: list[bool]) -> Iterator[None]:
    """Files of any method say which layers keep exact tokens."""
    own = pipeline.region_keys

    def keys(plan: Plan) -> dict[str, Any]:
        return own(plan) | {KEYS["version"]: 1, KEYS["exact"]: exact}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "region_keys", keys)
        patch.setattr(short, "SHORT_WINDOW", 1024)
        yield


@pytest.fixture(scope="module")
def plain(gemma: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with said(LAYERS):
        return run(gemma, tmp_path_factory.mktemp("plain") / "plain.gguf", "--method", "none")


@pytest.fixture(scope="module", params=FILES)
def m(
    request: pytest.FixtureRequest, gemma: Path, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    calibration = () if request.param == "plain" else ("--calib", str(text))
    out = tmp_path_factory.mktemp("alone") / "model.gguf"
    with said(LAYERS):
        model = run(gemma, out, *FILES[request.param], *calibration)
    assert [layer["exact"] for layer in model.layers] == LAYERS
    return model


def session(m: Any, **options: Any) -> Any:
    given = {"n_ctx": N_CTX, "n_threads": 1, "n_ubatch": UBATCH, "kv": "f32", "sink": 4, "recent": 20}
    return core.Session(m, **(given | options))


def slots(s: Any) -> dict[str, int]:
    return {region["name"]: region["slots"] for region in s.kv_bytes()["regions"]}


REGIONS: list[dict[str, Any]] = [
    {"sink": 0, "recent": 0},
    {"sink": 4, "recent": 0},
    {"sink": 4, "recent": 20},
    {"sink": 4, "recent": 100},
    {"sink": 2, "recent": 0, "recent_ratio": 0.1},
]


@pytest.mark.parametrize("kv", ["f32", "q4"])
@pytest.mark.parametrize("regions", REGIONS, ids=str)
def test_equals_the_stock_expression(m: Any, regions: dict[str, Any], kv: str) -> None:
    """Prompt and single tokens, of a context that is many windows long."""
    got = []
    for implementation in ("fused", "reference"):
        s = session(m, **regions, kv=kv, implementation=implementation)
        assert slots(s)["ring"] == SLOTS
        rows = [s.decode(IDS[:600], output="all"), *(s.decode([token]) for token in IDS[600:])]
        got.append(np.concatenate(rows))
    # a code of one row may differ where sums do
    assert distance(*got) < (EXACT if kv == "f32" else 1e-2)


@pytest.mark.parametrize("regions", REGIONS, ids=str)
def test_rows_are_read_from_the_cache(
    gemma: Path, plain: Any, tmp_path: Path, regions: dict[str, Any]
) -> None:
    """Where exact tokens are stored as all others it is the same which layers keep them."""
    everywhere = run(gemma, tmp_path / "plain.gguf", "--method", "none")
    for kv in ("f32", "q4"):
        formats = {"kv": kv, "kv_sink": kv, "kv_recent": kv, "kv_rotate": False}
        rows = [session(m, **regions, **formats).decode(IDS, output="all") for m in (everywhere, plain)]
        assert distance(*rows) < (EXACT if kv == "f32" else 1e-2)
    if regions["recent"] > 0:  # and else not
        rows = [session(m, **regions, kv="q4").decode(IDS[:300], output="all") for m in (everywhere, plain)]
        assert distance(*rows) > 1e-2


def test_pieces_equal_the_whole(m: Any) -> None:
    """Nothing but the exact windows of other layers hangs on how a prompt is cut."""
    expected = session(m, sink=0, recent=0, n_ctx=N_CTX).decode(IDS, output="all")
    for n_ubatch in (1, 7, 64, 200, N_CTX):
        s = session(m, sink=0, recent=0, n_ubatch=n_ubatch)
        assert slots(s)["ring"] == min(N_CTX, round_up(WINDOW + n_ubatch, 64))
        assert distance(s.decode(IDS, output="all"), expected) < EXACT
    if (
        m.is_plain or m.layers[1]["v"]["form"] == "a"
    ):  # whose exact tokens are no others than those of f32 rows
        whole = session(m).decode(IDS, output="all")
        s = session(m)
        assert distance(np.concatenate([s.decode([token]) for token in IDS]), whole) < EXACT
        assert distance(whole, expected) < EXACT
    assert distance(session(m).decode([*IDS[:40], 5, *IDS[41:]], output="all"), expected) > 1e-3


@pytest.mark.parametrize("n_ctx", [64, 100, 256])
def test_a_context_no_longer_than_the_window(m: Any, n_ctx: int) -> None:
    """The ring has no more slots than the context, and that is enough for all sequences."""
    s = session(m, n_ctx=n_ctx, n_seq_max=4)
    assert slots(s)["ring"] == slots(s)["middle"] == round_up(n_ctx, 64)
    pieces = np.array_split(np.arange(n_ctx), 4)
    got = {i: s.decode(IDS[: len(of)], seq=[i] * len(of), output="all") for i, of in enumerate(pieces)}
    for i, of in enumerate(pieces):
        alone = session(m).decode(IDS[: len(of)], output="all")
        assert distance(got[i], alone) < EXACT
    with pytest.raises(core.Error, match=r"^\[context\] expected at most"):
        s.decode([1])
    s.seq_rm(2)
    more = s.decode(IDS[len(pieces[0]) : len(pieces[0]) + 10], seq=[0] * 10, output="all")
    alone = session(m).decode(IDS[: len(pieces[0]) + 10], output="all")[-10:]
    assert distance(more, alone) < EXACT


def test_lazy_prefill(m: Any) -> None:
    """The prompt is exact, and what follows reads its window's rows."""
    if not m.is_plain and m.layers[0]["v"]["form"] == "a":
        pytest.skip("exact K and V are not in the file")
    for n, more in ((600, {}), (60, {"n_ctx": 128, "n_seq_max": 2})):
        rows = []
        for implementation in ("fused", "reference"):
            s = session(m, prefill="lazy", implementation=implementation, **more)
            prompt = s.decode(IDS[:n], output="all")
            rows.append(np.concatenate([prompt, *(s.decode([t]) for t in IDS[n : n + 60])]))
        assert distance(*rows) < EXACT
        if m.is_plain:
            assert distance(rows[0], session(m).decode(IDS[: n + 60], output="all")) < EXACT


def test_sequences(m: Any) -> None:
    """Batches of several, a copy, a rewind, what is gone."""
    s = session(m, n_seq_max=3, recent=0)
    assert slots(s)["ring"] == 192  # 3 windows and a ubatch
    text = {0: IDS[:300], 1: IDS[300:345], 2: IDS[400:580]}
    got: dict[int, list[np.ndarray]] = {0: [], 1: [], 2: []}
    for first in range(0, 300, 10):
        batch = [(i, t) for i in text for t in text[i][first : first + 10]]
        rows = s.decode([t for _, t in batch], seq=[i for i, _ in batch], output="all")
        for (i, _), row in zip(batch, rows, strict=True):
            got[i].append(row)
    for i, rows in got.items():
        assert distance(np.array(rows), session(m, recent=0).decode(text[i], output="all")) < EXACT
    assert s.seq_rm(1)
    s.seq_cp(0, 1)
    for i, ids in ((0, IDS[400:450]), (1, IDS[500:550])):
        rows = s.decode(ids, seq=[i] * 50, output="all")
        alone = session(m, recent=0).decode([*IDS[:300], *ids], output="all")[300:]
        assert distance(rows, alone) < EXACT
    assert not s.seq_rm(0, 100, -1)
    assert s.seq_pos_max(0) == 349
    s.seq_keep(2)
    assert s.n_cells_used() == 180
    with pytest.raises(core.Error, match=r"^\[seq_cp\] expected the 48 tokens"):
        s.seq_cp(2, 0, 0, 100)


def test_rewinds(m: Any) -> None:
    """As many tokens as the ring has slots for beside a window; recent ones leave it too."""
    s = session(m, recent=0)
    s.decode(IDS[:400], output="none")
    assert s.seq_rm(0, 390, -1)
    again = s.decode(IDS[390:420], output="all")
    assert distance(again, session(m, recent=0).decode(IDS[:420], output="all")[390:]) < EXACT
    s = session(m, recent=100)
    s.decode(IDS[:90], output="none")
    assert s.seq_rm(0, 60, -1)
    rows = s.decode(IDS[60:200], output="all")
    expected = session(m, recent=100).decode(IDS[:200], output="all")[60:]
    assert distance(rows, expected) < EXACT


def test_shifts(m: Any) -> None:
    if m.layers[0]["k"]["path"] != "rebuild":
        pytest.skip("rows carry positions")
    s = session(m)
    s.decode(IDS[:400], pos=list(range(50, 450)), output="none")
    s.seq_add(0, 0, -1, -50)
    t = session(m, sink=0)
    t.decode(IDS[:400], output="none")
    rows = [of.decode(IDS[400:450], output="all") for of in (s, t)]
    # behind position 50 no token is a sink
    assert distance(*rows) < (1e-3 if m.layers[0]["v"]["form"] == "a" else 0.1)


@pytest.mark.parametrize("regions", REGIONS, ids=str)
def test_states(m: Any, regions: dict[str, Any]) -> None:
    s = session(m, kv="q4", **regions)
    for token in IDS[:300]:
        s.decode([token], output="none")
    state = s.state_bytes()
    other = session(m, kv="q4", **regions)
    other.decode(IDS[350:500], output="none")
    other.set_state(state)
    for token in IDS[300:400]:
        assert np.array_equal(s.decode([token]), other.decode([token]))
    with pytest.raises(core.Error, match=r"^\[state\] expected"):
        session(m, kv="q4", **regions).set_state(state[:-1])


def test_one_sequence_travels_alone(m: Any) -> None:
    s = session(m, n_seq_max=2)
    for begin in range(0, 300, UBATCH):
        s.decode(IDS[begin : begin + UBATCH], seq=[1] * UBATCH, output="none")
    at = s.seq_pos_max(1) + 1
    state = s.seq_state_bytes(1)
    expected = np.concatenate([s.decode([t], seq=[1]) for t in IDS[at : at + 80]])
    other = session(m, n_seq_max=2)
    for begin in range(0, 200, UBATCH):
        other.decode(IDS[begin : begin + UBATCH], seq=[1] * UBATCH, output="none")
    other.set_seq_state(0, state)
    assert distance(np.concatenate([other.decode([t], seq=[0]) for t in IDS[at : at + 80]]), expected) < EXACT


def test_bytes(plain: Any) -> None:
    """Sinks and recent tokens take rows in one layer of three, and the forecast says so."""
    s = session(plain, kv="q8")
    kv = s.kv_bytes()
    assert slots(s) == {"sink": 16, "recent": 96, "middle": N_CTX, "ring": SLOTS}
    f16, q8 = 2 * 2 * 2 * 32, 2 * 2 * (4 + 32)  # K and V of 2 heads of 32
    assert kv["k"] + kv["v"] == f16 * (16 + 96) + q8 * (N_CTX + 2 * SLOTS)
    assert kv["cells"] == 12 * (16 + 96 + N_CTX + SLOTS)
    assert kv["layer_slots"] == [SLOTS, N_CTX, SLOTS]
    forecast = plain.forecast(N_CTX, kv="q8", sink=4, recent=20, n_ubatch=UBATCH)
    assert {name: forecast[name] for name in ("total", "k", "v", "cells")} == {
        name: kv[name] for name in ("total", "k", "v", "cells")
    }


def test_blocks_of_other_layers(plain: Any) -> None:
    """K of layers without a window may lie in blocks; those in the ring store single tokens."""
    with pytest.raises(
        core.Error, match=r"^\[kv k\] expected a format of single tokens, as layers with a sl"
    ):
        session(plain, kv="", kv_k="c4", kv_v="q4")
    v = ["f32"] * 6
    plans = {"kv": "", "k_plan": ["f32", "f32", "c8", "c8", "f32", "f32"], "v_plan": v}
    s = session(plain, **plans, recent=32)
    assert slots(s)["ring"] == SLOTS
    rows = [s.decode(IDS[:400], output="all"), *(s.decode([t]) for t in IDS[400:500])]
    exact = session(plain, recent=32).decode(IDS[:500], output="all")
    assert 1e-6 < distance(np.concatenate(rows), exact) < 0.1
    state = s.state_bytes()
    other = session(plain, **plans, recent=32)
    other.set_state(state)
    assert np.array_equal(other.decode([1]), s.decode([1]))


@pytest.mark.parametrize(
    ("exact", "message"),
    [
        ([False, True], r"^\[latentkv.regions.exact\] expected an array of 3 entries; got 2$"),
        (
            [True, False, True],
            r"^\[latentkv.regions.exact\] expected true for layer 1, which has no sliding window; got false$",
        ),
    ],
)
def test_refused(gemma: Path, tmp_path: Path, exact: list[bool], message: str) -> None:
    with said(exact), pytest.raises(core.Error, match=message):
        run(gemma, tmp_path / "bad.gguf", "--method", "none")


def test_converter_counts_what_is_allocated(
    gemma: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that keeps no exact tokens where windows are short: the budget pays for none there."""
    monkeypatch.setattr(short, "SHORT_WINDOW", 1024)
    options = (*FILES["waterfill"], "--master", "--served-context", "8192", "--calib", str(text))
    m = run(gemma, tmp_path / "m.gguf", *options)
    report = json.loads((tmp_path / "m.report.json").read_text())
    assert [layer.get("exact", True) for layer in report["layers"]] == LAYERS
    assert [layer["exact"] for layer in m.layers] == LAYERS
    at = report["cache"]["context"]
    assert report["cache"]["bytes"] == m.forecast(at)["total"]
    ring = round_up(WINDOW + 128, 64)
    at_budget = m.forecast(8192)
    assert at_budget["layer_slots"] == [ring, 8192, ring]
    f16 = 4 * 64 * (8192 + 2 * ring) + 12 * (8192 + ring)
    assert 0.36 < at_budget["total"] / f16 <= 0.4
