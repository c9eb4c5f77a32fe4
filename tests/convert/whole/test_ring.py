"""Layers with a sliding window hold its tokens, not the context's: the same logits in fewer bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import asking
import numpy as np
import pytest
from both import core, distance, load, logits, on_gpu, run, token_ids
from gguf_files import plain

from conftest import Tiny
from latentkv.cli import main as command
from latentkv.engine.drafting import Drafting
from latentkv.engine.request import Request, Ticket
from latentkv.engine.scheduler import Scheduler, Shift
from latentkv.plan.master import choose, planned
from latentkv.plan.presets import PRESETS
from latentkv.sampling.options import SamplingOptions

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
    "waterfill": ("--kv-budget", "40%", "--recent", "32", *CALIBRATED),
}


@pytest.fixture(scope="module")
def gemma(random_checkpoint: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("gemma"), "gemma3_text", max_position_embeddings=N_CTX)


@pytest.fixture(scope="module", params=FILES)
def m(request: pytest.FixtureRequest, gemma: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    text = tmp_path_factory.mktemp("calib") / "calib.txt"
    text.write_bytes(bytes(np.random.default_rng(5).integers(32, 127, 6000, dtype=np.uint8)))
    calibration = () if request.param == "plain" else ("--calib", str(text))
    return run(gemma, text.with_name("model.gguf"), *FILES[request.param], *calibration)


@pytest.mark.parametrize("more", [(), ("--quick",)], ids=["gradients", "quick"])
def test_a_window_no_longer_than_the_exact_one(gemma: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    """No query of such a layer reads what is cached: it takes the fewest bytes, and costs nothing."""
    (tmp_path / "calib.txt").write_bytes(
        bytes(np.random.default_rng(5).integers(32, 127, 6000, dtype=np.uint8))
    )
    run(
        gemma,
        tmp_path / "m.gguf",
        "--kv-budget",
        "40%",
        "--recent",
        str(WINDOW),
        "--calib",
        str(tmp_path / "calib.txt"),
        *CALIBRATED,
        *more,
    )
    layers = json.loads((tmp_path / "m.report.json").read_text(encoding="utf-8"))["layers"]
    formats = [
        {each for side in "kv" for group in layers[at][side]["formats"] for each in group} for at in range(3)
    ]
    assert formats[0] == formats[2] == {"n1"} != formats[1]


def test_blocks_of_tokens_beside_a_ring(gemma: Path, tmp_path: Path) -> None:
    """Layers that hold the context keep K in blocks, and the others rows of q8 in their window."""
    model = run(gemma, tmp_path / "m.gguf", "--method", "none")
    n_windowed, n_whole = 2, 1
    width = model.n_head_kv * model.head_dim
    n = 19 * UBATCH
    expected = ringed(model).decode(IDS[:n], output="all")
    errors = {}
    for name in (*PRESETS, "c8/q8"):
        cache = planned(model, {"kv": name})
        s = ringed(model, **{**cache, "n_ubatch": UBATCH})
        k = {region["name"]: (region["slots"], region["k"]) for region in s.kv_bytes()["regions"]}
        bits = int(cache["kv_k"][1])
        assert k["middle"] == (N_CTX, N_CTX * n_whole * width * (bits + 1) // 8)
        assert k["ring"] == (SLOTS, SLOTS * n_windowed * (width + 4 * model.n_head_kv))
        got = np.concatenate([s.decode(IDS[i : i + UBATCH], output="all") for i in range(0, n, UBATCH)])
        errors[name] = distance(got, expected)
    assert errors["c8/q8"] < 0.02 < errors["smallest"]


def ringed(m: Any, **options: Any) -> Any:
    return core.Session(
        m, **({"n_ctx": N_CTX, "n_threads": 1, "n_ubatch": UBATCH, "kv": "f32", "recent": 0} | options)
    )


def unringed(m: Any, **options: Any) -> Any:
    """An ubatch as long as the context leaves the ring nothing to save."""
    s = ringed(m, **({"n_ubatch": N_CTX} | options))
    assert "ring" not in slots(s)
    return s


def slots(s: Any) -> dict[str, int]:
    return {region["name"]: region["slots"] for region in s.kv_bytes()["regions"]}


REGIONS: list[dict[str, Any]] = [
    {},
    {"sink": 4},
    {"recent": 20},
    {"sink": 4, "recent": 100},
    {"sink": 2, "recent": 0, "recent_ratio": 0.1},
]


@pytest.mark.parametrize("regions", REGIONS, ids=str)
@pytest.mark.parametrize("implementation", ["fused", "reference"])
def test_equals_the_whole_context(m: Any, regions: dict[str, Any], implementation: str) -> None:
    """Prompt and single tokens, of a context that is many windows long."""
    wide = {"kv_sink": "f32", "kv_recent": "f32"}
    if "recent" in regions:  # an exact window shortens ubatches: the context is what leaves no room to save
        whole = ringed(m, **regions, **wide, n_ctx=N_CTX, n_seq_max=21)
        assert "ring" not in slots(whole)
    else:
        whole = unringed(m, **regions, **wide)
    expected = np.concatenate([whole.decode(IDS[i : i + 32], output="all") for i in range(0, N, 32)])
    s = ringed(m, **regions, **wide, implementation=implementation)
    assert slots(s)["ring"] == SLOTS
    got = [s.decode(IDS[:600], output="all")]
    got += [s.decode([token]) for token in IDS[600:]]
    assert distance(np.concatenate(got), expected) < EXACT


def test_equals_transformers(gemma: Path, tmp_path: Path) -> None:
    m = run(gemma, tmp_path / "plain.gguf", "--method", "none")
    assert distance(ringed(m).decode(IDS, output="all"), logits(load(gemma), IDS)) < 1e-3


def test_chunks_equal_the_whole(m: Any) -> None:
    expected = ringed(m).decode(IDS, output="all")
    for n_ubatch in (1, 7, 64, 200):
        s = ringed(m, n_ubatch=n_ubatch)
        assert distance(s.decode(IDS, output="all"), expected) < EXACT
    assert distance(unringed(m).decode([*IDS[:40], 5, *IDS[41:]], output="all"), expected) > 1e-3


@pytest.mark.parametrize("kv", ["q4", "q2"])
def test_the_same_codes(m: Any, kv: str) -> None:
    """Rows are quantized from the same vectors wherever they lie."""
    expected = unringed(m, kv=kv).decode(IDS[:300], output="all")
    got = ringed(m, kv=kv, n_ubatch=128).decode(IDS[:300], output="all")
    error = distance(unringed(m).decode(IDS[:300], output="all"), expected)
    assert distance(got, expected) < 0.5 * error


def test_lazy_prefill(m: Any) -> None:
    if not m.is_plain and m.layers[0]["v"]["form"] == "a":
        pytest.skip("exact K and V are not in the file")
    s = ringed(m, prefill="lazy")
    whole = unringed(m, prefill="lazy")
    for of in (s, whole):
        of.decode(IDS[:600], output="none")
    got, expected = (np.concatenate([of.decode([t]) for t in IDS[600:]]) for of in (s, whole))
    assert distance(got, expected) < EXACT


@pytest.mark.parametrize("regions", [{}, {"sink": 4, "recent": 20}], ids=str)
def test_sequences_share_the_ring(m: Any, regions: dict[str, Any]) -> None:
    s = ringed(m, n_seq_max=3, **regions)
    assert slots(s)["ring"] == 192  # 3 windows and a ubatch
    lengths = {0: 300, 1: 45, 2: 180}
    text = {0: IDS[:300], 1: IDS[300:345], 2: IDS[400:580]}
    got: dict[int, list[np.ndarray]] = {0: [], 1: [], 2: []}
    for first in range(0, 300, 10):
        batch = [(i, t) for i in text for t in text[i][first : first + 10]]
        rows = s.decode([t for _, t in batch], seq=[i for i, _ in batch], output="all")
        for (i, _), row in zip(batch, rows, strict=True):
            got[i].append(row)
    for i, rows in got.items():
        assert len(rows) == lengths[i]
        alone = ringed(m, **regions).decode(text[i], output="all")
        assert distance(np.array(rows), alone) < (EXACT if not regions else 1e-2)


def test_copies(m: Any) -> None:
    s = ringed(m, n_seq_max=2)
    s.decode(IDS[:400], output="none")
    s.seq_cp(0, 1)
    for i, ids in ((0, IDS[400:500]), (1, IDS[500:600])):
        rows = s.decode(ids, seq=[i] * 100, output="all")
        assert distance(rows, ringed(m).decode([*IDS[:400], *ids], output="all")[400:]) < EXACT
    s.seq_rm(1)
    with pytest.raises(
        core.Error, match=r"^\[seq_cp\] expected the 48 tokens before a sequence's end .*got tokens"
    ):
        s.seq_cp(0, 1, 0, 300)
    assert (s.seq_pos_max(1), s.n_cells_used()) == (-1, 500)
    s.seq_cp(0, 1)
    s.seq_keep(0)
    more = s.decode(IDS[600:], output="all")
    assert distance(more, ringed(m).decode([*IDS[:500], *IDS[600:]], output="all")[500:]) < EXACT


def test_what_is_gone_is_not_brought_back(m: Any) -> None:
    """Removing a sequence's end is refused where its next token would miss rows; nothing changes then."""
    s = ringed(m)
    s.decode(IDS[:400], output="none")
    assert not s.seq_rm(0, 100, -1)
    assert (s.seq_pos_max(0), s.n_cells_used()) == (399, 400)
    assert not s.seq_rm(-1, 100, -1)
    # as many as the ring has slots for beside a window
    assert s.seq_rm(0, 390, -1)
    again = s.decode(IDS[390:420], output="all")
    assert distance(again, ringed(m).decode(IDS[:420], output="all")[390:]) < EXACT
    # the beginning, and a hole behind the window
    assert s.seq_rm(0, 0, 100)
    assert s.seq_rm(0, 200, 210)
    assert s.seq_rm(0, 0, -1)
    assert s.n_cells_used() == 0
    assert distance(s.decode(IDS, output="all"), ringed(m).decode(IDS, output="all")) < EXACT


def test_shifts(m: Any) -> None:
    if m.layers[0]["k"]["path"] != "rebuild":
        pytest.skip("rows carry positions")
    s = ringed(m)
    s.decode(IDS[:400], pos=list(range(50, 450)), output="none")
    s.seq_add(0, 0, -1, -50)
    assert (s.seq_pos_min(0), s.seq_pos_max(0)) == (0, 399)
    assert (
        distance(s.decode(IDS[400:500], output="all"), ringed(m).decode(IDS[:500], output="all")[400:]) < 1e-3
    )
    # what stays is shorter than a window: the next token would see tokens from before the hole
    assert s.seq_rm(0, 100, 480)
    with pytest.raises(
        core.Error, match=r"^\[seq_add\] expected .*got positions 480 to -1 of sequence 0 moved by -380"
    ):
        s.seq_add(0, 480, -1, -380)
    assert s.seq_pos_max(0) == 499


@pytest.mark.parametrize("regions", [{}, {"sink": 4, "recent": 20}], ids=str)
def test_state_is_bit_exact(m: Any, regions: dict[str, Any]) -> None:
    s = ringed(m, kv="q4", **regions)
    s.decode(IDS[:500], output="none")
    state = s.state_bytes()
    expected = np.concatenate([s.decode([t]) for t in IDS[500:600]])
    other = ringed(m, kv="q4", **regions)
    other.set_state(state)
    assert np.array_equal(np.concatenate([other.decode([t]) for t in IDS[500:600]]), expected)
    with pytest.raises(
        core.Error, match=r"^\[state\] expected version 5 of a state; got 1, which another latentkv"
    ):
        other.set_state(state[:12] + (1).to_bytes(4, "little") + state[16:])
    for cut in (8, len(state) // 2, len(state) - 1):
        broken = ringed(m, kv="q4", **regions)
        with pytest.raises(core.Error, match=r"^\[state\] expected"):
            broken.set_state(state[:cut])
        assert broken.n_cells_used() == 0
    with pytest.raises(core.Error, match=r"^\[state\] expected regions . as in this session"):
        ringed(m, kv="q4", **regions, n_ctx=600, n_seq_max=20).set_state(state)


@pytest.mark.parametrize("regions", [{}, {"sink": 4, "recent": 20}], ids=str)
def test_a_state_goes_to_other_rows_and_rings(m: Any, regions: dict[str, Any]) -> None:
    """From all rows to those of a ring; from a ring only to one that holds no more."""
    whole = {"kv": "f32", "n_ctx": 600, "n_seq_max": 20} | regions  # too small a context for a ring
    s = ringed(m, **whole)
    s.decode(IDS[:500], output="none")
    state = s.state_bytes()
    fine = ringed(m, kv="f32", **regions)
    assert fine.set_state(state, accept="any") == ""
    coarse = ringed(m, kv="q8", **regions)
    assert coarse.set_state(fine.state_bytes(), accept="any").startswith("rows of 32.0 bits a channel")
    assert slots(coarse) == slots(ringed(m, kv="q8", **regions))
    expected, got, near = (
        np.concatenate([each.decode([t]) for t in IDS[500:600]]) for each in (s, fine, coarse)
    )
    assert distance(got, expected) < 1e-4
    assert 1e-5 < distance(near, expected) < 0.05
    with pytest.raises(
        core.Error, match=r"^\[state\] expected rows of the token at position .* had forgotten it"
    ):
        ringed(m, **whole).set_state(fine.state_bytes(), accept="any")


def test_bytes_are_of_the_slots_there_are(gemma: Path, tmp_path: Path) -> None:
    m = run(gemma, tmp_path / "plain.gguf", "--method", "none")
    s = ringed(m, kv="f16")
    kv = s.kv_bytes()
    row = 2 * 2 * 2 * 32  # K and V in f16 of 2 heads of 32
    assert slots(s) == {"middle": N_CTX, "ring": SLOTS}
    assert kv["k"] + kv["v"] == row * (N_CTX + 2 * SLOTS)
    assert kv["cells"] == 12 * (N_CTX + SLOTS)
    assert kv["total"] == kv["k"] + kv["v"] + kv["cells"]
    assert kv["per_token"] == kv["total"] / N_CTX
    assert kv["f16_per_token"] == (kv["k"] + kv["v"]) / N_CTX
    forecast = m.forecast(N_CTX, kv="f16", recent=0, n_ubatch=UBATCH)
    assert {name: forecast[name] for name in ("total", "k", "v", "cells")} == {
        name: kv[name] for name in ("total", "k", "v", "cells")
    }
    # a window as long as the context, or nearly: rows of the whole context
    assert slots(ringed(m, n_ctx=64, n_ubatch=32)) == {"middle": 64}


@pytest.mark.parametrize("regions", [(4, 16), (4, 256), (0, 0)], ids=str)
def test_a_budget_counts_windows(gemma: Path, regions: tuple[int, int], tmp_path: Path) -> None:
    """`--kv-budget` is a share of an f16 cache whose windowed layers hold their window too, at conversion and
    when a master file is opened; and the converter counts the bytes that the runtime allocates on a GPU."""
    (tmp_path / "calib.txt").write_bytes(
        bytes(np.random.default_rng(5).integers(32, 127, 6000, dtype=np.uint8))
    )
    sink, recent = regions
    options = ["--kv-budget", "40%", "--served-context", "8192", "--sink", str(sink), "--recent", str(recent)]
    calibration = ["--calib", str(tmp_path / "calib.txt"), "--master", *CALIBRATED, "--calib-window", "512"]
    run(gemma, tmp_path / "model.gguf", *options, *calibration)
    m = on_gpu(tmp_path / "model.gguf")
    for budget in ("40%", "25%"):
        chosen = choose(m, budget)
        assert chosen.n_ctx == 8192
        cache = m.forecast(8192, **chosen.options())
        ring = -(-(WINDOW + 512) // 64) * 64
        assert cache["layer_slots"] == [ring, 8192, ring]
        f16 = 4 * 64 * (8192 + 2 * ring) + 12 * (8192 + ring)
        share = cache["total"] / f16
        assert 0.9 * float(budget[:-1]) < 100 * share <= float(budget[:-1])
    report = json.loads((tmp_path / "model.report.json").read_text())
    at = report["cache"]["context"]
    forecast = m.forecast(at)
    assert report["cache"]["bytes"] == forecast["total"]
    assert report["bytes_per_token"]["plan"] == pytest.approx(forecast["per_token"] - 12 * (at + ring) / at)
    assert report["bytes_per_token_f16_full"] == pytest.approx(forecast["f16_per_token"])


def test_a_ring_stands_beside_token_blocks(gemma: Path, tmp_path: Path) -> None:
    m = run(gemma, tmp_path / "plain.gguf", "--method", "none")
    found = slots(ringed(m, kv="", kv_k="c4", kv_v="q4", recent=32))
    assert found["ring"] < found["middle"] // 4


def test_llama_computes_anew_what_is_gone(gemma: Path, tmp_path: Path) -> None:
    from latentkv import Llama

    path = plain(gemma, tmp_path / "plain.gguf")
    llm = Llama(str(path), n_ctx=N_CTX, n_batch=UBATCH, n_ubatch=UBATCH, type_k="f32", verbose=False)
    long, other = IDS[:500], [*IDS[:200], 7, *IDS[201:300]]
    llm.eval(long)
    assert llm.reuse_prefix(other) == 0
    llm.eval(other)
    assert llm.n_tokens == 300
    fresh = Llama(str(path), n_ctx=N_CTX, n_batch=UBATCH, n_ubatch=UBATCH, type_k="f32", verbose=False)
    fresh.eval(other)
    assert distance(llm.logits, fresh.logits) < EXACT
    # a few tokens back are still there
    llm.n_tokens = 290
    assert llm.n_tokens == 290


def test_commands_count_and_rewind(gemma: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(plain(gemma, tmp_path / "plain.gguf"))
    assert command(["info", path, "-c", str(N_CTX), "-ub", str(UBATCH)]) == 0
    shown = capsys.readouterr().out
    assert f"2 of 3 layers have a sliding window and hold {SLOTS} tokens; " in shown
    assert f"bytes/token is the average over {N_CTX}" in shown
    rows, cells = N_CTX * 256 + 2 * SLOTS * 256, 12 * (N_CTX + SLOTS)
    assert "100.0 %" in shown
    assert command(["info", path, "-c", str(N_CTX), "-ub", str(UBATCH), "--kv", "q8_0"]) == 0
    share = (rows * 36 / 64 + cells) / (rows + cells)  # a row of 34 bytes takes 36; f16 has the same cells
    assert f"{100 * share:.1f} %" in capsys.readouterr().out
    assert command(["info", path, "-c", "64"]) == 0
    assert "have a sliding window" not in capsys.readouterr().out
    # a prompt too long for the bench to take back: the depth is filled anew
    assert (
        command(["bench", path, "-p", "400", "-n", "4", "-d", "300", "-r", "2", "-ub", "32", "--json"]) == 0
    )
    results = json.loads(capsys.readouterr().out)["results"]
    assert [row["name"] for row in results] == ["pp400 @ d300", "tg4 @ d300"]


def test_requests_of_a_server_share_what_is_still_there(gemma: Path, tmp_path: Path) -> None:
    """A prompt that begins as another answer did: copied while its window is there, else computed."""
    m = run(gemma, tmp_path / "plain.gguf", "--method", "none")
    greedy = SamplingOptions(temperature=0)

    def ask(ids: list[int]) -> Ticket:
        return Ticket(Request(ids, greedy, 150, ignore_eos=True))

    def text(ticket: Ticket) -> str:
        return "".join(piece.text for piece in ticket)

    first, second = [*IDS[:250], *IDS[300:310]], [*IDS[:250], *IDS[400:410]]
    alone = []
    for ids in (first, second):
        one = Scheduler(m, ringed(m, n_ubatch=16))
        one.submit(ticket := ask(ids))
        while one.step():
            pass
        alone.append(text(ticket))
    for wait in (1, 120):  # tokens of the first answer before the second request comes
        both = Scheduler(m, ringed(m, n_ubatch=16, n_seq_max=2))
        assert "ring" in slots(both.session)
        both.submit(a := ask(first))
        while a.progress.completion_tokens < wait:
            both.step()
        both.submit(b := ask(second))
        while both.step():
            pass
        assert [text(a), text(b)] == alone
        assert (b.progress.timings.cached_n > 200) == (wait == 1)


def test_guesses_are_taken_back(m: Any) -> None:
    """Their rows have taken the place of what their sequence sees again without them."""

    def answers(drafting: Drafting | None) -> tuple[list[list[int]], Scheduler]:
        one = Scheduler(m, ringed(m, n_ubatch=16, n_seq_max=2), drafting=drafting)
        greedy = SamplingOptions(temperature=0)
        prompts = [IDS[:60] * 3, IDS[100:250]]
        tickets = [Ticket(Request(ids, greedy, 120, ignore_eos=True)) for ids in prompts]
        asking.run(one, *tickets)
        assert asking.are_whole(one)
        return [list(ticket.progress.tokens) for ticket in tickets], one

    want, plain = answers(None)
    got, one = answers(Drafting())
    assert got == want
    assert one.counters.drafted_tokens > 20
    assert one.counters.steps < plain.counters.steps


def test_a_server_shifts_what_is_still_there(m: Any) -> None:
    """Half of a full sequence is less than a window here: what the window holds stays, and the answer goes
    on."""
    if m.layers[0]["k"]["path"] != "rebuild":
        pytest.skip("rows carry positions")
    one = Scheduler(m, ringed(m, n_ctx=256, n_ubatch=16), n_ctx_seq=96, shift=Shift.of(m, 8))
    assert slots(one.session)["ring"] == 64
    one.submit(ticket := Ticket(Request(IDS[:40], SamplingOptions(temperature=0), 200, ignore_eos=True)))
    while one.step():
        pass
    assert ticket.progress.completion_tokens == 200
    assert len(one.slots[0].tokens) == one.session.seq_pos_max(0) + 1 < 96


@pytest.mark.parametrize("regions", [{}, {"sink": 4, "recent": 20}], ids=str)
def test_one_sequence_travels_alone(m: Any, regions: dict[str, Any]) -> None:
    s = ringed(m, n_seq_max=2, **regions)
    for begin in range(0, 300, UBATCH):
        s.decode(IDS[begin : begin + UBATCH], seq=[1] * UBATCH, output="none")
    at = s.seq_pos_max(1) + 1
    state = s.seq_state_bytes(1)
    expected = np.concatenate([s.decode([t], seq=[1]) for t in IDS[at : at + 80]])
    other = ringed(m, n_seq_max=2, **regions)
    for begin in range(0, 200, UBATCH):
        other.decode(IDS[begin : begin + UBATCH], seq=[1] * UBATCH, output="none")
    other.set_seq_state(0, state)
    got = np.concatenate([other.decode([t], seq=[0]) for t in IDS[at : at + 80]])
    assert distance(got, expected) < EXACT


def test_a_sequence_in_parts(m: Any) -> None:
    """What windows see goes with the last part."""
    ids = [7 + at % 90 for at in range(400)]
    s = ringed(m, n_seq_max=2)
    s.decode(ids, output="none")
    parts = s.seq_state_parts(0, [0, 100, 300])
    other = ringed(m, n_seq_max=2)
    other.set_seq_state(1, parts)
    wanted = s.decode([9])
    got = other.decode([9], seq=[1])
    assert np.linalg.norm(got - wanted) < 1e-5 * np.linalg.norm(wanted)
    with pytest.raises(ValueError, match=r"^\[state\] expected the rows that each sequence's window"):
        other.set_seq_state(1, parts[:2])
    assert other.seq_pos_max(1) == -1
