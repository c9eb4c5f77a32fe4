"""Estimates of Fisher moments without the loss's gradient: right in their own layer, and near in size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_calibrate import stream
from test_copies import RECENT, SINK, WINDOW, body

from latentkv_convert import calibrate, cli
from latentkv_convert.calibrate import copies, probes
from latentkv_convert.ir import Array
from latentkv_convert.recipe import Recipe
from latentkv_convert.source.checkpoint_source import CheckpointSource

Tiny = Callable[..., Path]
N_WINDOWS = 65


def weights(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    n = q.shape[2]
    scores = (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT) * scale
    return scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf).softmax(-1)[0]


def test_value_moments_are_squared_weights_times_the_output_matrix(tiny: Tiny) -> None:
    """E[g gᵀ] of v = Σ p² W_oᵀ W_o over queries that read the copy."""
    source = stream(tiny(), windows=N_WINDOWS, window=WINDOW)
    found = dict(probes.collect(source, SINK, RECENT, seed=0))
    windows, _ = copies.split(N_WINDOWS)
    spec = source.spec
    repeats = spec.n_head // spec.n_kv
    squares = torch.zeros(spec.n_head, dtype=torch.float64)
    with source.layer(0) as live, torch.no_grad():
        x = source.embed()[windows]
        for row in x:
            h = live.attention_input(row[None])
            q, k = (
                source.positions.of(0).turned(live.heads(side, live.get_submodule(f"attn_{side}")(h)))
                for side in "qk"
            )
            squares += (weights(q, k, spec.attention_scale) * body(WINDOW)).square().sum((1, 2)).double()
        w_o: Any = live.attn_output
        out = w_o.weight.double().unflatten(1, (spec.n_head, -1))  # [d, n_head, head_dim]
    tokens = len(windows) * (WINDOW - SINK)
    for head in range(spec.n_kv):
        own = range(head * repeats, (head + 1) * repeats)
        expected = sum(squares[h] / tokens * out[:, h].T @ out[:, h] for h in own).numpy()  # type: ignore[union-attr]
        block = slice(head * spec.head_dim, (head + 1) * spec.head_dim)
        got = found[0]["v_fisher"][block, block]
        assert np.trace(got) == pytest.approx(np.trace(expected), rel=0.1)


@pytest.fixture(scope="module")
def both(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Mapping[str, Array]]]:
    """Of the demo model."""
    recipe = Recipe(
        demo,
        Path("out"),
        "waterfill",
        {"sink": 4, "recent": 64},
        calib=demo / "sample-calib.txt",
        fisher_tokens=2048,
        calib_window=512,
        cache=False,
    )
    source = CheckpointSource(demo)
    return {
        name: list(calibrate.collect((name,), recipe, source)[0]["copies"]) for name in ("copies", "probes")
    }


def test_costs_are_near_those_of_gradients(both: dict[str, list[Mapping[str, Array]]]) -> None:
    """½ tr(F M) of every layer, which is what budgets are spread by, spans a factor of hundreds."""
    costs = {
        name: np.array(
            [[0.5 * np.vdot(layer[f"{s}_fisher"], layer[f"{s}_moment"]) for s in "kv"] for layer in layers]
        )
        for name, layers in both.items()
    }
    ratio = costs["probes"] / costs["copies"]
    assert (ratio > 0.2).all()
    assert (ratio < 4).all()
    assert costs["copies"].max() / costs["copies"].min() > 100
    for exact, quick in zip(both["copies"], both["probes"], strict=True):
        a, b = exact["k_fisher"], quick["k_fisher"]
        assert np.vdot(a, b) / np.linalg.norm(a) / np.linalg.norm(b) > 0.6


def test_the_other_arrays_are_the_same(both: dict[str, list[Mapping[str, Array]]]) -> None:
    for exact, quick in zip(both["copies"], both["probes"], strict=True):
        assert set(exact) == set(quick) - {"gain", "own", "nats"}
        for name in ("k_moment", "v_moment", "k_mean", "v_mean", "k_rows", "v_rows"):
            assert np.allclose(exact[name], quick[name], rtol=1e-3, atol=1e-4)


def test_the_report_says_so(
    tiny: Tiny,
    calib: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a gradient of the loss was taken")

    monkeypatch.setattr(copies, "_backward", refuse)
    words = [str(tiny()), "-o", str(tmp_path / "out.gguf"), "--calib", str(calib), "--kv-budget", "40%"]
    words += ["--calib-window", "192", "--fisher-tokens", "768", "--recent", "32", "--no-plot"]
    assert cli.main([*words, "--quick"]) == 0
    assert "calibrated with --quick" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="gradient"):
        cli.main(words)
