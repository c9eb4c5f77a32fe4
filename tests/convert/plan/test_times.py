"""A plan's time on a GPU: fitted from measurements, and what groups of KV heads follow from it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import TINY

from latentkv_convert import cli
from latentkv_convert.errors import ConvertError
from latentkv_convert.frontier import Frontier, Line, Point
from latentkv_convert.ir import LayerPlan, ModelSpec
from latentkv_convert.plan.methods import waterfill
from latentkv_convert.plan.times import features, gpu_file
from latentkv_convert.plan.times.features import Times
from latentkv_convert.plan.times.fit import fit, nnls
from latentkv_convert.plan.times.gpu_file import Measured, side_of
from latentkv_convert.plan.waterfill import choose
from latentkv_convert.source import archs

Tiny = Callable[..., Path]
DEPTHS = waterfill.DEPTHS
# of 1024 channels, K and V at about 14 % of f16
PLAN = ((("q8", 1), ("q4", 8), ("q2", 8), ("q1", 7)), (("q4", 8), ("q2", 8), ("q1", 8)))


def command(checkpoint: Path, out: Path, calib: Path, times: Path) -> list[str]:
    return [str(checkpoint), "-o", str(out), "--calib", str(calib), "--gpu-times", str(times)]


def sizes(n_head: int, n_kv: int, head_dim: int) -> ModelSpec:
    spec = archs.model_spec(TINY["llama"])
    return dataclasses.replace(spec, n_layer=32, n_head=n_head, n_kv=n_kv, head_dim=head_dim)


def layer(spec: ModelSpec, group: int, k_path: str = "rotated") -> LayerPlan:
    """Rows of a group that are in proportion to its width, in whole units of 32."""
    units = group * spec.head_dim // 32
    sides = []
    for path, parts in ((k_path, PLAN[0]), ("latent", PLAN[1])):
        segments = [(name, 32 * round(n * units / 32)) for name, n in parts if round(n * units / 32)]
        sides.append(side_of(spec.n_kv, path, group, segments or [("q2", 32)]))
    return LayerPlan(*sides)


def lines(spec: ModelSpec, times: Times, made: list[int]) -> Iterator[Line]:
    """Narrower groups lose more, as on every model that was measured; `made`: the groups looked at."""
    for groups in waterfill._groupings(waterfill.AUTO, waterfill.AUTO, spec):
        made.append(groups["k"])
        counted = features.of(spec, layer(spec, groups["k"]))
        us = tuple(times.us(counted, depth) for depth in DEPTHS)
        known = None if None in us else us
        yield Line(groups, (Point(1.0, 1000, 0.1 / groups["k"], known, "f16"),))  # type: ignore[arg-type]


def chosen(spec: ModelSpec, times: Times, prefer: str = "speed") -> tuple[int, list[int]]:
    full = tuple(times.us(features.full(spec), depth) or 0.0 for depth in DEPTHS)
    made: list[int] = []
    found, at = choose(lines(spec, times, made), full, prefer)
    return found[at].groups["k"], made


def test_a_layer_with_a_window_reads_no_more_than_the_window() -> None:
    spec = sizes(32, 8, 128)
    block = dataclasses.replace(spec.block, windows=(1000, 1000, 1000, 0) * 8)
    some = features.mean_full(dataclasses.replace(spec, block=block))
    for depth, read in ((500, 500), (4000, (3 * 1000 + 4000) / 4)):
        assert some.at(depth)["full_bytes"] == pytest.approx(4096 * read / 1e6)
        assert features.mean_full(spec).at(depth)["full_bytes"] == pytest.approx(4096 * depth / 1e6)


def test_least_squares_without_negative_values() -> None:
    from scipy.optimize import nnls as expected

    rng = np.random.default_rng(0)
    for n in (1, 4, 12):
        a, b = rng.standard_normal((30, n)), rng.standard_normal(30)
        assert np.allclose(nnls(a, b), expected(a, b)[0], atol=1e-9)


def test_a_fit_finds_the_coefficients_that_made_the_times() -> None:
    rng = np.random.default_rng(0)
    true = dict(zip(features.UNITS, rng.uniform(0.5, 5, len(features.UNITS)), strict=True))
    del true["q1"], true["rebuild"]
    counts = [{name: float(rng.lognormal()) for name in true} for _ in range(300)]
    points = [(each, sum(true[name] * n for name, n in each.items())) for each in counts]
    found = fit(points)
    assert found.coefficients.keys() == true.keys()  # the others were not measured
    assert all(abs(found.coefficients[name] / true[name] - 1) < 0.02 for name in true)
    assert found.worst < 0.02
    assert found.median <= found.worst


@pytest.mark.parametrize("name", gpu_file.SHIPPED)
def test_the_shipped_times_are_the_fit_of_the_points_beside_them(name: str) -> None:
    content = json.loads(gpu_file.SHIPPED[name].read_text(encoding="utf-8"))
    files = [Measured.of(entry) for entry in content["measured"]]
    times = gpu_file.load(Path(name))
    errors = []
    for each in files:
        counted = features.of(each, each.layer, times.shared_kb)
        for depth, us in each.us.items():
            predicted = times.us(counted, depth)
            assert predicted is not None
            errors.append(abs(predicted / us - 1))
    assert max(errors) == pytest.approx(content["fit"]["worst_relative_error"], abs=2e-3)
    assert np.median(errors) < 0.1
    assert np.mean(np.array(errors) < 0.25) > 0.9
    names = (content[key] for key in ("gpu", "capabilities", "command", "build"))
    again = gpu_file.document(*names, files, times.shared_kb)
    for name, entry in content["coefficients"].items():
        assert again["coefficients"][name]["value"] == pytest.approx(entry["value"], rel=0.05, abs=0.02)


def test_times_are_those_of_the_gpu_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def name_for(capability: str | None) -> str:
        monkeypatch.setattr(gpu_file, "here", lambda: capability)
        return gpu_file.load(None).gpu

    assert "H100" in name_for("9.0")
    assert name_for(None) == name_for("6.1") == gpu_file.load(Path(gpu_file.DEFAULT.stem)).gpu
    named = [
        capability
        for path in gpu_file.SHIPPED.values()
        for capability in json.loads(path.read_text(encoding="utf-8"))["capabilities"]
    ]
    assert len(set(named)) == len(named)


def test_a_card_with_times_of_its_own_is_planned_by_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file beside those shipped is enough: its capabilities say whose it is; the report names its GPU."""
    content = json.loads(gpu_file.DEFAULT.read_text(encoding="utf-8"))
    content |= {"gpu": "an RTX 4090, in kind", "capabilities": ["8.6", "8.9"], "shared_kb": 99}
    path = tmp_path / "rtx4090.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    monkeypatch.setattr(gpu_file, "SHIPPED", {**gpu_file.SHIPPED, "rtx4090": path})
    for capability, gpu, shared_kb in (
        ("8.9", "an RTX 4090, in kind", 99),
        ("9.0", "NVIDIA H100 80GB HBM3", 227),
    ):
        monkeypatch.setattr(gpu_file, "here", lambda found=capability: found)
        times = gpu_file.load(None)
        assert (times.gpu, times.shared_kb) == (gpu, shared_kb)
        line = Line({"k": 4, "v": 4}, (Point(1.0, 1000, 0.01, (20.0, 40.0), "f16"),))
        found = Frontier(times.gpu, (4096, 16384), 4096, (30.0, 60.0), (line,), 0, 32768, "speed")
        assert gpu in found.sentence


def test_work_is_counted_in_thread_blocks() -> None:
    """8B: 32 query rows for a group of 8; groups of 1 pad 4 rows to 8. 7B: 8 rows for a group of 8."""
    wide, narrow = (features.of(sizes(32, 8, 128), layer(sizes(32, 8, 128), n)) for n in (8, 1))
    many = features.of(sizes(32, 32, 128), layer(sizes(32, 32, 128), 8))
    assert wide is not None
    assert narrow is not None
    assert many is not None
    assert [each.slot["softmax"] for each in (wide, narrow, many)] == [32e-6, 64e-6, 32e-6]
    assert wide.step["factors"] == 2 * 1024 * (768 + 768) / 1e6
    assert wide.slot["products"] == 32 * 1536 / 1e9
    assert many.slot["q4"] == 4 * wide.slot["q4"]
    # K in groups of 8 beside V in groups of 4: two units, each decodes all of K
    spec = sizes(32, 8, 128)
    mixed = features.of(spec, LayerPlan(layer(spec, 8).k, layer(spec, 4).v))
    assert mixed is not None
    assert mixed.slot["products"] == 2 * 16 * (768 + 384) / 1e9
    rebuilt = features.of(spec, layer(spec, 8, "rebuild"))
    assert rebuilt is not None
    assert rebuilt.slot["expand"] == 768 * 1024 / 1e9
    assert features.full(spec).at(1000)["full_bytes"] == 4096 * 1000 / 1e6


def test_thread_blocks_of_consumer_cards_share_query_rows() -> None:
    """8B in groups of 8: 32 rows and 768 channels of K leave no room for a tile in 99 KB, so each row is
    decoded twice; groups of 4 fit."""
    spec = sizes(32, 8, 128)
    for group, times_decoded in ((8, 2), (4, 1)):
        wide, small = (features.of(spec, layer(spec, group), kb) for kb in (227, 99))
        assert wide is not None
        assert small is not None
        assert small.slot["q4"] == times_decoded * wide.slot["q4"]
        assert small.slot["softmax"] == wide.slot["softmax"]
        assert small.step["block"] == wide.step["block"] / times_decoded


def test_8b_and_7b_get_the_widest_groups_that_keep_up_with_f16() -> None:
    times = gpu_file.load(None)
    assert chosen(sizes(32, 8, 128), times) == (4, [8, 4])
    assert chosen(sizes(32, 32, 128), times) == (8, [8])


def test_a_small_model_keeps_one_latent_for_all_its_heads() -> None:
    """SmolLM2-135M: three KV heads of 64."""
    assert chosen(sizes(9, 3, 64), gpu_file.load(None))[0] == 3


def test_what_no_group_is_fast_enough_for_goes_by_divergence() -> None:
    slow = Times("slow", gpu_file.load(None).coefficients | {"latent": 1000.0})
    assert chosen(sizes(32, 8, 128), slow) == (8, [8, 4, 2, 1])


def test_unknown_times_leave_the_widest_group() -> None:
    known = gpu_file.load(None).coefficients
    nothing = Times("bare", {name: value for name, value in known.items() if name != "q4"})
    assert nothing.us(features.of(sizes(32, 8, 128), layer(sizes(32, 8, 128), 8)), 4096) is None
    assert chosen(sizes(32, 8, 128), nothing) == (8, [8])
    assert chosen(sizes(32, 8, 128), nothing, "size") == (8, [8, 4])
    odd = side_of(8, "rotated", 8, [("q4", 48)])
    assert features.of(sizes(32, 8, 128), LayerPlan(odd, odd)) is None
    other = side_of(8, "rotated", 8, [("q3", 64)])
    assert features.of(sizes(32, 8, 128), LayerPlan(other, other)) is None


def test_size_goes_by_divergence_and_by_time_where_that_is_equal() -> None:
    def line(group: int, predicted: float, us: float) -> Line:
        return Line({"k": group, "v": group}, (Point(1.0, 1000, predicted, (us,), "f16"),))

    def size(*given: Line) -> tuple[int, int]:
        seen, at = choose(iter(given), (5.0,), "size")
        return seen[at].groups["k"], len(seen)

    assert size(line(8, 0.010, 20), line(4, 0.012, 10), line(2, 0.001, 5)) == (8, 2)
    assert size(line(8, 0.0100, 20), line(4, 0.0101, 10), line(2, 0.02, 5)) == (4, 3)
    assert size(line(8, 0.010, 20), line(4, 0.007, 30), line(2, 0.01, 5)) == (4, 3)


def test_a_choice_is_one_line() -> None:
    def said(us: tuple[float, ...] | None, n_lines: int, prefer: str = "speed") -> str:
        own = [Line({"k": n, "v": n}, (Point(1.0, 1000, 0.1, us, "f16"),)) for n in (4, 2)[:n_lines]]
        return Frontier("GPU", (4096, 16384), 9000, (10.2, 28.0), tuple(own), 0, 32768, prefer).sentence

    fast = "groups of 4 KV heads: 8.1 us a layer at 4096 tokens (full f16 10.2), GPU"
    assert said((8.1, 20.0), 2) == fast
    assert said((8.1, 40.0), 1) == f"{fast}; slower than full f16 at 16384"
    assert (
        said((8.1, 40.0), 2)
        == f"{fast}; no group is as fast as full f16 at every depth, this one loses least"
    )
    assert said((8.1, 40.0), 2, "size") == fast
    assert said(None, 1) == "groups of 4 KV heads"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "expected a file that bench/attention_times.py wrote at"),
        ("nonsense", "in JSON; got"),
        ("[]", 'with "gpu"; got'),
        ('{"gpu": "x"}', 'with "coefficients"; got'),
        (
            '{"gpu": "x", "coefficients": {"speed": {"value": 1}}}',
            "expected coefficients of full, full_once",
        ),
        (
            '{"gpu": "x", "coefficients": {"full": {"value": -1, "unit": "us"}}}',
            '"full" as {"value": a number from 0, "unit": "us"}; got {"value": -1, "unit": "us"}',
        ),
        ('{"gpu": "x", "coefficients": {"full": {"value": 1, "unit": "ms"}}}', '"unit": "ms"}'),
        ('{"gpu": "x", "shared_kb": 8, "coefficients": {"full": 1}}', '"shared_kb" of 48 to 227; got 8'),
    ],
)
def test_other_files_are_refused(
    tiny: Tiny,
    calib: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str | None,
    message: str,
) -> None:
    path, directory = tmp_path / "gpu.json", tiny()
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConvertError, match=r"^\[--gpu-times\] expected"):
        gpu_file.load(path)
    capsys.readouterr()
    assert cli.main(command(directory, tmp_path / "out.gguf", calib, path)) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert line.startswith("error: [--gpu-times] expected")
    assert message in line


def test_a_file_of_times_is_not_overwritten(
    tiny: Tiny, calib: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, directory = tmp_path / "out.report.json", tiny()
    path.write_text("{}")
    capsys.readouterr()
    assert cli.main(command(directory, tmp_path / "out.gguf", calib, path)) == 2
    assert "expected a file that this conversion does not read" in capsys.readouterr().err


@pytest.mark.parametrize("master", [False, True])
def test_a_report_has_what_the_plan_was_chosen_from(
    tiny: Tiny, calib: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], master: bool
) -> None:
    """One latent of K and V for both heads, and one for each where the first is slow."""
    content = json.loads(gpu_file.DEFAULT.read_text(encoding="utf-8"))
    content["gpu"] = "Test GPU"
    for name in ("block", "products"):
        content["coefficients"][name]["value"] = 0.0
    content["coefficients"]["latent"]["value"] = 0.0
    content["coefficients"]["factors"]["value"] = 2000.0  # narrow groups have fewer
    (tmp_path / "gpu.json").write_text(json.dumps(content))
    directory = tiny(num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    out = tmp_path / "out.gguf"
    words = command(directory, out, calib, tmp_path / "gpu.json")
    words += ["--calib-window", "384", "--recent", "32", "--kv-budget", "40%"]
    capsys.readouterr()
    assert cli.main([*words, *(["--master"] if master else [])]) == 0
    text = capsys.readouterr().out
    report: dict[str, Any] = json.loads(out.with_suffix(".report.json").read_text())
    found = report["frontier"]
    assert found["gpu"] == "Test GPU"
    assert found["depths"] == [4096, 16384, 65536]
    assert [line["group"] for line in found["lines"]] == [{"k": 2, "v": 2}, {"k": 1, "v": 1}]
    own = next(line for line in found["lines"] if line["chosen"])
    assert {layer[side]["group"] for layer in report["layers"] for side in "kv"} == {own["group"]["k"]}
    for line in found["lines"]:
        assert [point["budget"] for point in line["points"]] == [0.5, 1.0, 2.0]
        for key, sign in (("bytes", 1), ("predicted", -1)):
            values = [sign * point[key] for point in line["points"]]
            assert values == sorted(values)
    at = next(point for point in own["points"] if point["budget"] == 1)
    factors = 0 if master else report["added_weight_bytes"]
    assert at["bytes"] == report["cache"]["bytes"] + factors
    assert "KV heads a group" in text
    assert f"groups of {own['group']['k']} KV head" in text
    assert (tmp_path / "out.ranks.png").read_bytes().startswith(b"\x89PNG")
