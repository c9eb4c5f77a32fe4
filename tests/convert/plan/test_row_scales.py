"""Rows whose groups begin with scales: the converter forecasts what the runtime stores, and budgets hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from both import core, distance, run
from test_waterfill import prepared

from conftest import keys
from latentkv.plan.kv_budget import parse
from latentkv.plan.master import choose
from latentkv_convert import calibrate
from latentkv_convert.cli import parse as parse_command
from latentkv_convert.errors import ConvertError
from latentkv_convert.fuse.rotation import finished
from latentkv_convert.ir import SIDES
from latentkv_convert.plan import forecast, methods
from latentkv_convert.rows import plan_sizes, quantizer, sizes
from latentkv_convert.source.checkpoint_source import CheckpointSource
from latentkv_convert.write.check import check_plan

ROW = (("n8", 32), ("n6", 32), ("n4", 32), ("n3", 32)), (("n2", 64), ("n1", 64), ("none", 32))
SHORT = {"served_context": 4096, "recent": 64, "prefer": "speed", "segment": None}


def rows(n: int = 200) -> np.ndarray:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, 288)) * np.exp(rng.standard_normal((n, 1)))
    x[0] = 0
    return x.astype(np.float32)


def segments(groups: Any) -> list[list[tuple[int, str]]]:
    return [[(width, name) for name, width in group] for group in groups]


@pytest.mark.parametrize("groups", [ROW, ((("n2", 64), ("n1", 224)),), ((("n4", 288),),)], ids=str)
def test_rows_are_the_runtimes(groups: Any) -> None:
    """But for values at the border of two codes, where the sums' order decides."""
    x = rows()
    _, expected = core.stored_rows(groups, x)
    got = quantizer.stored_rows(torch.from_numpy(x), segments(groups)).numpy()
    norm = np.linalg.norm(x, axis=1) + 1e-9
    apart = np.linalg.norm(got - expected, axis=1) / norm
    assert (apart < 1e-3).mean() > 0.9
    assert np.linalg.norm(got - x) < 1.001 * np.linalg.norm(expected - x)
    assert not got[0].any()


def test_coarse_segments_do_not_spoil_the_scale_of_fine_ones() -> None:
    x = rows()[1:]
    fine = quantizer.stored_rows(torch.from_numpy(x[:, :128]), [[(128, "n4")]]).numpy()
    for others in ([[(128, "n4"), (96, "n2"), (64, "n1")]], [[(128, "n4")], [(160, "n4")]]):
        both = quantizer.stored_rows(torch.from_numpy(x), others).numpy()
        assert np.array_equal(both[:, :128], fine)


@pytest.fixture(scope="module")
def planned(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    options = SHORT | {"kv_budget": parse("14%"), "scales": "row"}
    work, method = prepared(demo, demo / "sample-calib.txt", 512, **options)
    plan = methods.planned(method, work)
    patch.undo()
    return work, method, plan


def test_a_budget_is_met_from_below_within_one_step(planned: Any) -> None:
    work, _, plan = planned
    check_plan(plan, work.spec)
    names = {
        name
        for layer in plan.layers
        for side in SIDES
        for group in layer.side(side).formats
        for name in group
    }
    assert names <= {"n8", "n6", "n4", "n3", "n2", "n1"}
    channels = sum(sum(side.ranks) for layer in plan.layers for side in (layer.k, layer.v))
    factors = 2 * channels * 2 * work.spec.kv_width
    cache = plan_sizes.kv_bytes(work.spec, plan, 4096)
    size, budget = cache["total"] + factors, 0.14 * cache["f16_total"]
    assert budget - 32 * (4096 + 4 * work.spec.kv_width) < size <= budget


def test_all_channels_have_second_moment_1(planned: Any) -> None:
    work, method, plan = planned
    for side in SIDES:
        (basis,) = finished(work, plan.layers[3].side(side), 3, side)
        moment = method.shape.cached(work, 3, side).moment
        assert np.allclose(np.einsum("ij,ik,kj->j", basis.down, moment, basis.down), 1, atol=1e-3)
        assert np.allclose(basis.up @ basis.down, np.eye(len(basis.up)), atol=1e-6)


def test_the_forecast_is_what_decoding_measures(demo: Path, calib: Path, tmp_path: Path) -> None:
    """Token by token through the cache, on the window that the forecast was measured on. By stock operations:
    fused ones read bytes, which no forecast knows (9 % more here)."""
    path = tmp_path / "row.gguf"
    text = ["--calib", str(calib), "--calib-window", "384", "--recent", "48", "--scales", "row"]
    model = run(demo, path, *text)
    plain = run(demo, tmp_path / "plain.gguf", "--method", "none")
    encoded = calibrate.encode(calib.read_text("utf-8"), CheckpointSource(demo))
    seen = []
    for window in forecast.held_back(calibrate.Sample.draw(encoded, 32768, 384, 0, deep=768)):
        logs = []
        for each, kv in ((plain, {"kv": "f32"}), (model, {})):
            live = core.Session(
                each, n_ctx=768, n_threads=1, n_ubatch=1, fixed_window=True, implementation="reference", **kv
            )
            logits = torch.from_numpy(live.decode(window.tolist(), output="all"))
            logs.append(logits[len(window) // 2 : -1].double().log_softmax(-1))
        seen.append(reference.divergence(*logs))
    assert abs(np.mean(seen) / keys(path)["latentkv.predicted_kld"] - 1) < 0.08
    report = json.loads((tmp_path / "row.report.json").read_text())
    assert report["recipe"]["scales"] == "row"
    assert model.forecast(32768)["total"] == report["cache"]["bytes"]


def test_a_master_is_planned_anew_within_its_budget(demo: Path, calib: Path, tmp_path: Path) -> None:
    path = tmp_path / "master.gguf"
    text = ["--calib", str(calib), "--calib-window", "384", "--recent", "48", "--scales", "row"]
    model = run(demo, path, "--master", *text)
    for budget, share in (("8.5%", 0.085), ("28%", 0.28)):
        chosen = choose(model, budget)
        cache = model.forecast(chosen.n_ctx, **chosen.options())
        n_slots = cache["regions"][-1]["slots"]
        total = share * n_slots * (cache["f16_per_token"] + 12)
        assert total - 32 * n_slots < cache["total"] <= total


@pytest.mark.parametrize("prefer", ["speed", "size"])
def test_every_group_has_scales(prefer: str, demo: Path, calib: Path, tmp_path: Path) -> None:
    """Rows of several groups: as many bytes as planned, and fused operations read what stock ones do."""
    path = tmp_path / "groups.gguf"
    text = ["--calib", str(calib), "--calib-window", "384", "--recent", "48", "--scales", "row"]
    model = run(demo, path, "--prefer", prefer, "--group", "1", *text)
    groups = [group for layer in model.layers for side in "kv" for group in layer[side]["formats"]]
    assert len(groups) > 2 * len(model.layers)
    assert {name[0] for group in groups for name in group} == {"n"}
    report = json.loads((tmp_path / "groups.report.json").read_text())
    assert model.forecast(32768)["total"] == report["cache"]["bytes"]
    ids = list(range(5, 205))
    whole, stock = (
        core.Session(model, n_ctx=256, n_threads=1, **options)
        for options in ({}, {"implementation": "reference"})
    )
    assert distance(whole.decode(ids, output="all"), stock.decode(ids, output="all")) < 1e-2
    again = core.Session(model, n_ctx=256, n_threads=1)
    again.set_state(whole.state_bytes())
    assert np.array_equal(again.decode([7], output="last"), whole.decode([7], output="last"))


@pytest.mark.parametrize(
    ("words", "shares"), [([], True), (["--scales", "segment"], False), (["--segment", "32"], False)]
)
def test_rows_begin_with_scales_by_default(words: list[str], shares: bool, demo: Path, calib: Path) -> None:
    recipe = parse_command([str(demo), "-o", "x.gguf", "--calib", str(calib), *words], "test")
    method = methods.module("waterfill").create(recipe.options, CheckpointSource(demo).spec)
    assert sizes.has_group_scales(method.shape.formats) == shares


def test_a_width_beside_one_scale_is_refused(planned: Any, demo: Path, calib: Path) -> None:
    with pytest.raises(ConvertError, match=r"\[--segment\] expected .*--scales row"):
        prepared(demo, calib, 384, scales="row", segment=64)
