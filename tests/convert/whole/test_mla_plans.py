"""Multi-head latent attention narrowed: the model's own latent in a basis of fewer channels, which its own
factors take in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from both import N, core, distance, expected_logits, on_gpu, run, session, step_by_step, token_ids
from gguf_files import plain, rewritten

from conftest import Tiny, keys, tensors
from latentkv.plan.master import choose
from latentkv_convert.errors import ConvertError
from latentkv_convert.source.gguf_source import GgufSource

TEXT = ["--calib-window", "128", "--calib-tokens", "1024"]
EXACT = ["--recent", "32", "--sink", "4"]
ALL = ["--kv-budget", "99%", *EXACT, *TEXT]  # every channel in q8
# Without experts, of which small differences choose others, and with YaRN.
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
DENSE: dict[str, Any] = {
    "first_k_dense_replace": 3,
    "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}


@pytest.mark.parametrize("centred", [False, True], ids=["as-they-are", "about-their-mean"])
def test_all_channels_are_the_original(
    centred: bool, tiny: Tiny, calib: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if centred:
        request.getfixturevalue("always")
    checkpoint, ids = tiny("deepseek_v3", **DENSE), token_ids()
    expected = expected_logits(checkpoint, ids)
    model = run(checkpoint, tmp_path / "out.gguf", *ALL, "--calib", str(calib))
    assert {(layer["k"]["path"], layer["v"]["path"]) for layer in model.layers} == {("value", "latent")}
    assert [layer["v"]["ranks"] for layer in model.layers] == [[32 + 64]] * 3
    assert ("blk.0.attn_v_e.bias" in tensors(tmp_path / "out.gguf")) == centred
    for options in ({}, {"implementation": "reference"}, {"sink": 0, "recent": 0}):
        live = core.Session(model, n_ctx=256, n_threads=1, kv="f32", kv_recent="f32", **options)
        assert distance(live.decode(ids, output="all"), expected) < 1e-3, options
    assert distance(step_by_step(model, ids, N - 80), expected[N - 81 :]) < 1e-3
    assert 1e-5 < distance(session(model, kv="").decode(ids, output="all"), expected) < 0.1
    live, other = (core.Session(model, n_ctx=256, n_threads=1, kv="q8") for _ in range(2))
    live.decode(ids[:100], output="last")
    other.set_state(live.state_bytes())
    assert np.array_equal(other.decode(ids[100:], output="all"), live.decode(ids[100:], output="all"))


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_a_budget_is_kept(model_type: str, tiny: Tiny, calib: Path, tmp_path: Path) -> None:
    """From a GGUF with experts, in one file and beside its base."""
    source, ids = plain(tiny(model_type), tmp_path / "stock.gguf"), token_ids()
    options = ["--kv-budget", "125000@256", *EXACT, *TEXT, "--calib", str(calib)]
    path = tmp_path / "out.gguf"
    model = run(source, path, *options)
    formats = [layer["v"]["formats"][0] for layer in model.layers]
    assert {names[0] for names in formats} <= {"q8", "q4", "q2", "q1"}  # of turned channels
    assert {name for names in formats for name in names} - {"q8"}
    live = core.Session(model, n_ctx=256, n_threads=1)
    assert live.kv_bytes()["total"] < on_gpu(path).forecast(256)["total"] <= 125000
    assert np.isfinite(live.decode(ids, output="all")).all()
    again = core.Session(model, n_ctx=256, n_threads=1, implementation="reference").decode(
        ids[:60], output="all"
    )
    live = core.Session(model, n_ctx=256, n_threads=1)
    assert distance(live.decode(ids[:60], output="all"), again) < 1e-3
    beside = tmp_path / "beside.gguf"
    run_beside(source, beside, *options)
    both = core.Model(str(source), latent_path=str(beside))
    other = core.Session(both, n_ctx=256, n_threads=1).decode(ids[:60], output="all")
    assert np.array_equal(other, core.Session(model, n_ctx=256, n_threads=1).decode(ids[:60], output="all"))


def test_a_master_is_planned_when_it_is_opened(tiny: Tiny, calib: Path, tmp_path: Path) -> None:
    """As a conversion for that budget plans it: turned channels and latents of a row apart."""
    checkpoint, ids = tiny("deepseek_v3", **DENSE), token_ids()
    options = (*EXACT, *TEXT, "--segment", "32", "--master", "--calib", str(calib))
    master = run(checkpoint, tmp_path / "master.gguf", *options, "--kv-budget", "60%")
    for budget in ("90%", "25%"):
        direct = run(checkpoint, tmp_path / "direct.gguf", *options, "--kv-budget", budget)
        chosen = choose(on_gpu(tmp_path / "master.gguf"), budget)
        formats = tuple(name for layer in direct.layers for name in layer["v"]["formats"][0])
        assert (chosen.k_plan, chosen.v_plan) == ((), formats)
        live = core.Session(master, n_ctx=256, n_threads=1, **chosen.options())
        expected = core.Session(direct, n_ctx=256, n_threads=1).decode(ids, output="all")
        assert distance(live.decode(ids, output="all"), expected) < 1e-5
    dropped = ["none" if at % 3 == 0 else "q4" for at in range(9)]
    with pytest.raises(core.Error, match=r"expected only trailing segments dropped; got q4 after none"):
        core.Session(master, n_ctx=256, v_plan=dropped)


def run_beside(source: Path, output: Path, *options: str) -> None:
    from latentkv_convert.cli import parse
    from latentkv_convert.pipeline import convert

    convert(parse([str(source), "-o", str(output), "--no-plot", "--sidecar", *options], "test"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--method", "palu"],
            r"--method\] expected waterfill or none, as keys and values are one row \(MLA\)",
        ),
        (["--scales", "row"], r"--scales\] expected segment for MLA: no factor .* turned channels"),
        (["--one-row"], r"--one-row\] expected a model that makes V of keys in some layer"),
    ],
)
def test_what_is_refused(options: list[str], message: str, tiny: Tiny, calib: Path, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=message):
        run(tiny("deepseek_v2"), tmp_path / "out.gguf", *options, "--calib", str(calib))


def test_descriptions_that_contradict_the_rows(tiny: Tiny, calib: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.gguf"
    run(tiny("deepseek_v3", **DENSE), path, *ALL, "--calib", str(calib))
    own = {key: value for key, value in keys(path).items() if key.startswith("latentkv.")}
    v = "latentkv.v."
    formats = ["none", *own[f"{v}segment_formats"][1:]]
    widths = [16, 48, *own[f"{v}segment_widths"][2:]]
    for changed, message in (
        ({"latentkv.k.path": ["rotated"] * 3}, "expected value beside latent with MLA"),
        ({f"{v}path": ["full"] * 3}, "expected value beside latent with MLA"),
        (
            {f"{v}segment_widths": widths},
            "expected segments of the 32 turned channels first|add up to the rank",
        ),
        (
            {f"{v}segment_formats": formats},
            "expected only trailing segments dropped|expected turned channels stored",
        ),
    ):
        bad = rewritten(path, tmp_path / "bad.gguf", keys=own | changed)
        with pytest.raises(core.Error, match=message):
            core.Model(str(bad))
    bad = rewritten(path, tmp_path / "bad.gguf", keys=own, without=("blk.1.attn_v_e.weight",))
    with pytest.raises(core.Error, match=r"expected a tensor blk\.1\.attn_v_e\.weight; got none"):
        core.Model(str(bad))
    with pytest.raises(ConvertError, match="expected full K and V; got a latent cache"):
        GgufSource(path)
