"""A master file planned at opening is the master that a conversion for that budget would have written."""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runtime import SAMPLE, WATERFILL, distance, model, session, tokens

from latentkv.errors import LatentKVError
from latentkv.plan import kv_budget
from latentkv.plan.master import choose, planned

CUT = (*WATERFILL, "--segment", "32")
BUDGETS = ("8.5%", "14%", "28%")


@pytest.fixture(scope="module")
def path(converted: Any) -> Path:
    found: Path = converted(*CUT, "--master")
    return found


@pytest.fixture(scope="module")
def master(path: Path) -> Any:
    return model(path)


def formats(m: Any, side: str) -> tuple[str, ...]:
    return tuple(name for layer in m.layers for group in layer[side]["formats"] for name in group)


@pytest.mark.parametrize("budget", BUDGETS)
def test_equals_a_conversion_for_that_budget(converted: Any, master: Any, budget: str) -> None:
    direct = model(converted(*CUT, "--master", "--kv-budget", budget))
    chosen = choose(master, budget)
    assert chosen.k_plan == formats(direct, "k")
    assert chosen.v_plan == formats(direct, "v")
    ids = tokens(master, 400)
    got = session(master, **planned(master, {"kv_budget": budget})).decode(ids, output="all")
    expected = session(direct).decode(ids, output="all")
    assert distance(got, expected) < 1e-6
    if budget != "14%":
        assert distance(session(master).decode(ids, output="all"), expected) > 1e-4


def test_exact_tokens_take_the_format_that_costs_less(master: Any) -> None:
    few, many = (choose(master, budget) for budget in ("6%", "90%"))
    assert (few.kv_sink, few.kv_recent) == ("q8_0", "q8_0")
    assert (many.kv_sink, many.kv_recent) == ("f16", "f16")
    assert choose(master, "90%", kv_sink="q8_0", kv_recent="q8_0").kld > many.kld
    assert choose(master, "6%", kv_sink="f16", kv_recent="f16").kld > few.kld
    assert choose(master, "6%", kv_recent="f16").kv_recent == "f16"


def test_opens_with_its_own_plan(master: Any) -> None:
    own = choose(master, "14%")
    assert (own.k_plan, own.v_plan) == (formats(master, "k"), formats(master, "v"))
    assert own.kld == pytest.approx(master.metadata["latentkv.predicted_kld"], rel=1e-5)
    assert session(master).kv_bytes() == session(master, **own.options()).kv_bytes()


@pytest.mark.parametrize("text", ["6%", "11%", "17.5%", "40%", "30MiB@32768", "4MiB@1024", "120MiB@100000"])
def test_a_budget_is_met_from_below_within_one_segment(master: Any, text: str) -> None:
    chosen = choose(master, text)
    cache = master.forecast(chosen.n_ctx, **chosen.options())
    n_slots = cache["regions"][-1]["slots"]
    budget = kv_budget.parse(text)
    total = budget.size or int(budget.share * n_slots * (cache["f16_per_token"] + 12))
    assert total - 64 * n_slots < cache["total"] <= total  # 64: f16 instead of none, the largest step


def test_exact_tokens_are_paid_from_the_budget(master: Any) -> None:
    for regions in ({"sink": 0, "recent": 0}, {"recent": 1024}, {"recent_ratio": 0.02}, {"kv_recent": "q8"}):
        chosen = choose(master, "14%", **regions)
        cache = master.forecast(chosen.n_ctx, **(regions | chosen.options()))
        share = cache["total"] / (chosen.n_ctx * (cache["f16_per_token"] + 12))
        assert 0.1395 < share <= 0.14


def test_more_bytes_are_expected_to_cost_less(master: Any) -> None:
    kld = [
        choose(master, f"{share}%").kld for share in (5, 6, 8.5, 10, 11, 12, 14, 14.1, 17.5, 20, 28, 50, 90)
    ]
    assert all(more < less for less, more in itertools.pairwise(kld))
    assert kld[0] > 3 * kld[6] > 100 * kld[-1] > 0


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"sink": 0}, "sink 4, asked for 0"),
        ({"sink": 0, "kv_sink": "q1"}, "sink 4, asked for 0"),
        ({"recent": 0}, "recent 128, asked for 0"),
        ({"recent_ratio": 0.1}, "recent 128, asked for 10 %"),
        ({"recent": 128, "recent_ratio": 0.1}, "recent 128, asked for 128 or 10 %"),
        ({"kv_sink": "q1"}, "sink tokens in f16 or q8_0, asked for q1"),
        (
            {"kv_recent": "q1", "recent": 64},
            "recent 128, asked for 64; recent tokens in f16 or q8_0, asked for q1",
        ),
        ({"sink": 4, "recent": 128, "kv_sink": "f16", "kv_recent": "f16"}, ""),
        ({"kv_sink": "q8_0", "kv_recent": "q8_0"}, ""),
        ({}, ""),
    ],
)
def test_no_forecast_for_other_exact_tokens(master: Any, asked: dict[str, Any], said: str) -> None:
    chosen = choose(master, "14%", **asked)
    assert chosen.unmeasured == said
    assert (chosen.kld is None) == bool(said)


def test_info_says_what_was_not_measured(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from latentkv.cli import main

    exact = ["--sink", "0", "--recent", "0"]
    assert main(["info", str(path), *exact]) == 0
    out, err = capfd.readouterr()
    reason = "no expected KLD: it was measured with sink 4, asked for 0; recent 128, asked for 0"
    assert out.splitlines()[-1] == reason
    assert all(line.endswith(" –") for line in out.splitlines()[-6:-1])
    # the line of a session with the same options
    session(model(path), n_ctx=1024, sink=0, recent=0)
    assert err.startswith("warning: [recent] expected at least 128 ")
    assert err in capfd.readouterr().err
    assert main(["info", str(path), *exact, "--json"]) == 0
    assert [row["kld"] for row in json.loads(capfd.readouterr().out)["budgets"]] == [None] * 5
    assert main(["info", str(path)]) == 0
    out, err = capfd.readouterr()
    assert "–" not in out
    assert "no expected" not in out
    assert err == ""


def test_states_go_from_larger_budgets_to_smaller_ones(master: Any) -> None:
    """Rows are coded anew by segments; what a smaller budget drops is not missed. Back they do not go."""
    ids = tokens(master, 400)

    def read(**options: Any) -> Any:
        made = session(master, **options)
        made.decode(ids, output="none")
        return made

    def planned_for(budget: str) -> dict[str, Any]:
        return planned(master, {"kv_budget": budget})

    exact = read(kv="f32").decode([9])
    states = {budget: read(**planned_for(budget)).seq_state_bytes(0) for budget in BUDGETS}
    assert len(states["8.5%"]) < len(states["14%"]) < len(states["28%"])
    for small, large in itertools.combinations(BUDGETS, 2):
        own = distance(read(**planned_for(small)).decode([9]), exact)
        restored = session(master, **planned_for(small))
        assert restored.set_seq_state(0, states[large], accept="finer")
        assert restored.seq_pos_max(0) == len(ids) - 1
        assert len(restored.seq_state_bytes(0)) == len(states[small])
        assert distance(restored.decode([9]), exact) < 1.5 * own + 0.01
        for take in ("set_state", "set_seq_state"):  # without convert
            with pytest.raises(ValueError, match=r"^\[state\] expected"):
                getattr(restored, take)(*([0] if "seq" in take else []), states[large])
            assert restored.n_cells_used() == 0
        with pytest.raises(ValueError, match=r"^\[state\] expected rows .* or finer, segment by segment"):
            session(master, **planned_for(large)).set_seq_state(0, states[small], accept="finer")


def test_llama_takes_a_budget(path: Path) -> None:
    from latentkv import Llama

    sizes = []
    for budget in ("", "8.5%", "28%"):
        with Llama(str(path), n_ctx=512, kv_budget=budget) as llama:
            sizes.append(llama.kv_bytes()["per_token"])
            assert llama("The", max_tokens=2, temperature=0)["usage"]["completion_tokens"] >= 1
    assert sizes[1] < sizes[0] < sizes[2]


def test_info_lists_budgets(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from latentkv.cli import main

    assert main(["info", str(path), "--kv-budget", "20%", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["budget"] for row in report["budgets"]] == ["28%", "20%", "17.5%", "14%", "11%", "8.5%"]
    assert report["budgets"][1]["per_token"] == report["forecast"][0]["per_token"]
    chosen = choose(model(path), "20%")
    planned_k = [name for layer in report["layers"] for group in layer["k"]["formats"] for name in group]
    assert tuple(planned_k) == chosen.k_plan
    assert main(["info", str(path)]) == 0
    assert "a master file: --kv-budget makes a new plan" in capsys.readouterr().out


def test_refusals_are_one_line(converted: Any, master: Any) -> None:
    plain = model(converted("--method", "none", "--outtype", "f32"))
    for m, options, message in (
        (plain, {"kv_budget": "14%"}, "got demo, which is not a master file; convert with --master"),
        (master, {"kv_budget": "14"}, "expected a share such as 14%, or bytes at a context"),
        (master, {"kv_budget": "14%", "kv": "q4"}, "expected no --kv beside it; got --kv-budget 14% and"),
        (
            master,
            {"kv_budget": "0.5%"},
            r"more than \d+ bytes \(304 exact slots and bookkeeping\); got \d+ bytes",
        ),
        (master, {"kv_budget": "2%"}, r"expected \d+ bytes or more for compressed rows; got \d+"),
    ):
        with pytest.raises(LatentKVError, match=rf"^\[--kv-budget\] .*{message}"):
            planned(m, options)


def test_bad_budgets_leave_with_status_2(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from latentkv.cli import main

    for command in (["info"], ["bench", "-p", "8"], ["perplexity", "-f", str(SAMPLE)], ["chat", "-p", "x"]):
        assert main([command[0], str(path), *command[1:], "--kv-budget", "0.5%"]) == 2
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert said.startswith("error: [--kv-budget] expected more than")


def test_a_plan_must_fit_the_file(master: Any) -> None:
    own = choose(master, "14%").options()
    for plan, message in (
        (own["k_plan"][:-1], r"^\[k_plan\] expected an array of \d+ entries"),
        (["none", *own["k_plan"][1:]], r"^\[k_plan\] expected only trailing segments dropped"),
        (["q9", *own["k_plan"][1:]], r"^\[k_plan\] expected known row formats .* got 'q9'"),
        (
            ["n4", *own["k_plan"][1:]],
            r"^\[k_plan\] expected formats n8 … n1 throughout a row, or none of them; got n4 and ",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            session(master, k_plan=plan)


@pytest.mark.parametrize("value", [np.nan, -1.0])
def test_hostile_tables_are_refused(path: Path, tmp_path: Path, value: float) -> None:
    """The first distortion in the file's bytes."""
    data = bytearray(path.read_bytes())
    key = b"latentkv.v.segment_distortions"
    at = data.index(key) + len(key) + 4 + 4 + 8  # array, element type, count
    data[at : at + 4] = struct.pack("<f", value)
    hostile = tmp_path / "hostile.gguf"
    hostile.write_bytes(data)
    with pytest.raises(
        ValueError, match=r"^\[latentkv.v.segment_distortions\] expected finite numbers from 0"
    ):
        model(hostile)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (b"none", "expected row formats that store single tokens; got none"),
        (b"c4q8", "expected known row for"),
    ],
)
def test_hostile_exact_formats_are_refused(path: Path, tmp_path: Path, name: bytes, message: str) -> None:
    """Of `f16` and `q8_0` in the file's bytes, whose array follows its key."""
    data = bytearray(path.read_bytes())
    key = b"latentkv.budget.exact_formats"
    at = data.index(key) + len(key) + 4 + 4 + 8
    first, second = struct.pack("<Q", 3) + b"f16", struct.pack("<Q", 4) + b"q8_0"
    assert data[at : at + len(first + second)] == first + second
    data[at : at + len(first + second)] = struct.pack("<Q", 4) + name + struct.pack("<Q", 3) + b"f16"
    hostile = tmp_path / "hostile.gguf"
    hostile.write_bytes(data)
    with pytest.raises(ValueError, match=rf"^\[latentkv.budget.exact_formats\] {message}"):
        model(hostile)
