"""A norm over all heads of K together: latents are made behind it, so that what is cached is linear again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from both import N, core, distance, expected_logits, load, logits, run, session, step_by_step, token_ids
from gguf_files import rewritten
from test_matrix import arguments, planned

from conftest import Tiny, keys, tensors
from latentkv_convert.calibrate.decoder import Decoder
from latentkv_convert.errors import ConvertError
from latentkv_convert.ir import SIDES
from latentkv_convert.plan import block_error
from latentkv_convert.source.gguf_source import GgufSource

TEXT = ["--calib-window", "128", "--calib-tokens", "1024"]
PALU = ["--method", "palu", "--keep", "1.0", "--group", "all", "--allocate", "uniform", *TEXT]
ALL = ["--kv-budget", "99%", "--recent", "32", "--sink", "4", *TEXT]  # every channel in q8


def test_projection_stays_and_latents_are_of_the_normed_keys(tiny: Tiny, calib: Path, tmp_path: Path) -> None:
    """Form E, also in a file without exact tokens: the norm needs all of K."""
    run(tiny("olmo2"), tmp_path / "out.gguf", *PALU, "--calib", str(calib))
    found = {
        name.removeprefix("blk.0.attn_") for name in tensors(tmp_path / "out.gguf") if "blk.0.attn_" in name
    }
    assert {name for name in found if name[0] == "k"} == {
        "k.weight",
        "k_norm.weight",
        "k_e.weight",
        "k_b.weight",
    }
    assert {name for name in found if name[0] == "v"} == {"v_a.weight", "v_b.weight"}


@pytest.mark.parametrize("prefer", ["size", "speed"])
@pytest.mark.parametrize("model_type", ["olmo2", "olmo3"])
def test_exact_windows_lazy_prompts_and_single_tokens_are_the_original(
    model_type: str, prefer: str, tiny: Tiny, calib: Path, tmp_path: Path
) -> None:
    directory, ids = tiny(model_type), token_ids()
    expected = expected_logits(directory, ids)
    model = run(directory, tmp_path / "out.gguf", *ALL, "--prefer", prefer, "--calib", str(calib))
    assert {layer["k"]["path"] for layer in model.layers} == {"rebuild" if prefer == "size" else "rotated"}
    for options in ({}, {"prefill": "lazy"}, {"implementation": "reference"}, {"sink": 0, "recent": 0}):
        live = core.Session(model, n_ctx=256, n_threads=1, kv="f32", kv_recent="f32", **options)
        assert distance(live.decode(ids, output="all"), expected) < 1e-3, options
    assert distance(step_by_step(model, ids, N - 80), expected[N - 81 :]) < 1e-3
    quantized = session(model, kv="").decode(ids, output="all")
    assert 1e-4 < distance(quantized, expected) < 0.1


def test_block_errors_are_those_of_cut_keys(tiny: Tiny, room: Path, always: None) -> None:
    """What the search of ranks runs is the model with K cut behind its norm, about its mean."""
    directory, ids = tiny("olmo2"), token_ids(60)
    work, plan = planned(directory, arguments(room, ["palu", "--group", "1"], 0.6))
    with reference.compressed(load(directory), work, plan) as truncated:
        expected = logits(truncated, ids)
    model = Decoder(work.source)
    with torch.no_grad():
        for index, layer in enumerate(plan.layers):
            for side in SIDES:
                block_error._replace(work, model.layers[index], index, side, layer.side(side).ranks)
        got = model(torch.tensor([ids]))[0].numpy()
    assert distance(got, expected) < 1e-5
    assert distance(expected_logits(directory, ids), expected) > 0.05


def test_bytes_are_those_of_the_latents_alone(tiny: Tiny, calib: Path, tmp_path: Path) -> None:
    """Nothing is cached for the norm: 256 slots of 3 layers, rows of 64 channels in q8."""
    model = run(tiny("olmo2"), tmp_path / "out.gguf", *PALU, "--calib", str(calib))
    middle = core.Session(model, n_ctx=256, n_threads=1, kv="q8").kv_bytes()["regions"][-1]
    assert (middle["k"], middle["v"]) == (256 * 3 * (4 + 64), 256 * 3 * (4 + 64))


def test_latents_of_the_layers_input_are_refused(tiny: Tiny, calib: Path, tmp_path: Path) -> None:
    run(tiny("olmo2"), tmp_path / "out.gguf", *PALU, "--calib", str(calib))
    own: dict[str, Any] = {
        key: value for key, value in keys(tmp_path / "out.gguf").items() if key.startswith("latentkv.")
    }
    path = rewritten(
        tmp_path / "out.gguf",
        tmp_path / "cut.gguf",
        keys=own,
        without=("blk.1.attn_k_e.weight",),
        extra={"blk.1.attn_k_a.weight": np.ones((64, 96), dtype=np.float32)},
    )
    message = r"expected blk\.1\.attn_k_e\.weight, latents of K after its norm over all heads; got none$"
    with pytest.raises(core.Error, match=message):
        core.Model(str(path))


def test_a_norm_of_another_width(tiny: Tiny, tmp_path: Path) -> None:
    run(tiny("olmo2"), tmp_path / "plain.gguf", "--method", "none")
    name = "blk.0.attn_k_norm.weight"
    path = rewritten(
        tmp_path / "plain.gguf", tmp_path / "x.gguf", without=(name,), extra={name: np.ones(48, np.float32)}
    )
    with pytest.raises(core.Error, match=r"expected blk\.0\.attn_k_norm\.weight with ne \[32\]; got \[48\]"):
        core.Model(str(path))
    with pytest.raises(ConvertError, match=r"attn_k_norm\.weight\] expected shape \[64\]; got \[48\]"):
        GgufSource(path)
