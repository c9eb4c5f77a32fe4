"""Bytes claimed are bytes allocated, and a context costs its cache and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runtime import DEMO, WATERFILL, model, session

# Bytes of one segment of `width` channels, from the byte maps' prose, not from the code under test.
SEGMENT = {
    "f32": lambda width: 4 * width,
    "f16": lambda width: 2 * width,
    "q8": lambda width: 4 + width,
    "q4": lambda width: 4 + width // 2,
    "q3": lambda width: 4 + (width * 3 // 8 + 3) // 4 * 4,
    "q2": lambda width: 4 + width // 4,
    "q8_0": lambda width: 34 * width // 32,
    "q4_0": lambda width: 18 * width // 32,
}
CELL = 4 + 8  # position and sequence mask


@pytest.fixture(scope="module", params=["plain", "latent"])
def m(request: pytest.FixtureRequest, converted: Any) -> Any:
    if request.param == "plain":
        return model(converted("--method", "none", "--outtype", "f32"))
    return model(converted("--method", "palu", "--keep", "0.5", "--group", "2", "--outtype", "f32"))


@pytest.mark.parametrize("kv", SEGMENT)
def test_row_bytes_are_the_advertised_ones(m: Any, kv: str) -> None:
    expected = {"k": 0, "v": 0}
    for layer in m.layers:
        for side in expected:
            expected[side] += sum((SEGMENT[kv](rank) + 3) // 4 * 4 for rank in layer[side]["ranks"])
    if kv.endswith("_0") and any(
        rank % 32 for layer in m.layers for side in expected for rank in layer[side]["ranks"]
    ):
        with pytest.raises(
            ValueError, match=rf"^\[kv k\] expected segments in multiples of 32 channels for {kv}"
        ):
            session(m, kv=kv)
        return
    n_ctx = 1024
    got = session(m, n_ctx=n_ctx, kv=kv).kv_bytes()
    assert got["k"] == n_ctx * expected["k"]
    assert got["v"] == n_ctx * expected["v"]
    assert got["cells"] == n_ctx * CELL
    assert got["total"] == got["k"] + got["v"] + got["cells"]
    assert got["per_token"] == expected["k"] + expected["v"] + CELL


@pytest.mark.parametrize("name", ["q8", "q4", "q2", "q8_0", "f16"])
def test_heads_of_24_channels_take_whole_units(name: str) -> None:
    from latentkv import _core

    unit = {"q8_0": 32, "f16": 8}.get(name, 16)
    assert _core.row_bytes([[(name, 24)]] * 3) == 3 * -(-SEGMENT[name](-(-24 // unit) * unit) // 4) * 4


@pytest.mark.parametrize(
    "options", [{}, {"sink": 4, "recent": 128}, {"n_seq_max": 4, "sink": 4, "recent": 64}]
)
def test_forecast_equals_allocation(m: Any, options: dict[str, int]) -> None:
    s = session(m, n_ctx=2048, kv="q4", **options)
    forecast = m.forecast(2048, kv="q4", **options)
    allocated = s.kv_bytes()
    assert {key: forecast[key] for key in allocated} == allocated
    assert sum(r["k"] + r["v"] for r in allocated["regions"]) == allocated["k"] + allocated["v"]
    s.decode([1] * 512, output="last")
    assert s.compute_bytes() <= forecast["compute"]


PROBE = """
import sys
from latentkv import _core
def resident():
    fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(fields["RssAnon"].split()[0]) * 1024
model = _core.Model(sys.argv[1])
n_ctx, kv = int(sys.argv[2]), sys.argv[3]
s = _core.Session(model, n_ctx=n_ctx, kv=kv, n_ubatch=256, n_threads=1)
s.decode([7] * 256, output="last")
start, used = resident(), s.n_cells_used()
s.decode([11] * (n_ctx - 257), output="none")
s.decode([13], output="last")
print(resident() - start, s.kv_bytes()["total"] * (n_ctx - used) // n_ctx)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize("kv", ["f16", "q4"])
def test_memory_grows_by_the_cache_and_nothing_else(converted: Any, kv: str) -> None:
    """From 256 tokens to a full context, resident memory grows by the rows written and a few pages."""
    path = converted("--method", "palu", "--keep", "0.5", "--group", "2", "--outtype", "f32")
    for n_ctx in (1024, 3072):
        run = subprocess.run(
            [sys.executable, "-c", PROBE, str(path), str(n_ctx), kv],
            capture_output=True,
            text=True,
            check=True,
        )
        grown, rows = map(int, run.stdout.split())
        assert rows * 0.9 - 65536 < grown < rows + 512 * 1024, (
            f"{kv} at {n_ctx}: grew {grown} bytes, rows {rows}"
        )


@pytest.mark.parametrize("n_ctx", [128, 1000, 32768])
def test_converter_foresees_the_bytes_of_a_plan(converted: Any, n_ctx: int) -> None:
    """--kv-budget is met with what the runtime allocates and what factors add to the weights."""
    from latentkv.plan import factors
    from latentkv_convert.ir import LayerPlan, Plan, SidePlan
    from latentkv_convert.rows import plan_sizes
    from latentkv_convert.source import archs

    path = converted(*WATERFILL)
    m = model(path)
    sides = [
        {
            side: SidePlan(
                layer[side]["path"],
                m.n_head_kv,
                tuple(layer[side]["ranks"]),
                tuple(map(tuple, layer[side]["segments"])),
                tuple(map(tuple, layer[side]["formats"])),
            )
            for side in "kv"
        }
        for layer in m.layers
    ]
    regions = m.regions
    plan = Plan(tuple(LayerPlan(**side) for side in sides), regions["sink"], regions["recent"])
    spec = archs.model_spec(json.loads((DEMO / "config.json").read_text(encoding="utf-8")))
    forecast = m.forecast(n_ctx)
    got, foreseen = forecast["total"], plan_sizes.kv_bytes(spec, plan, n_ctx)
    assert foreseen["total"] == got
    assert [foreseen[key] for key in ("share", "f16_total")] == [
        forecast[key] for key in ("share", "f16_total")
    ]
    if n_ctx == 32768:
        budget = 0.14 * n_ctx * (m.forecast(n_ctx, kv="f16")["f16_per_token"] + CELL)
        added = factors.added_bytes(m)
        assert 0.995 * budget < got + max(0, added) <= budget
