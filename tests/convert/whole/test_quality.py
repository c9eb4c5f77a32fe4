"""What the choices are for: how far the demo model with half its K and V dimensions is from itself, in torch.

Divergence, not perplexity: the demo model knows this text so badly (83) that losing a little improves its
perplexity.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from transformers import AutoModelForCausalLM

from latentkv_convert import calibrate
from latentkv_convert.calibrate.sample import encode, read_text
from latentkv_convert.plan import methods
from latentkv_convert.recipe import Recipe
from latentkv_convert.source.checkpoint_source import CheckpointSource
from latentkv_convert.work import Work


@pytest.fixture(scope="module")
def scores(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Any, ...], float]:
    """Mean KL divergence from the uncompressed model in nats per token, by (group, allocator, basis)."""
    source = CheckpointSource(demo)
    model = AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32).eval()
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    ids = encode(read_text(demo / "sample-val.txt"), source).ids
    windows = ids[: len(ids) // 256 * 256].reshape(-1, 256)[:8]
    original = reference.log_probabilities(model, windows)
    found: dict[tuple[Any, ...], float] = {}
    for choice in [
        (None, "uniform", "whitened"),
        (1, "uniform", "whitened"),
        (None, "uniform", "plain"),
        (None, "fisher", "whitened"),
    ]:
        options = dict(zip(("group", "allocate", "basis"), choice, strict=True)) | {
            "keep": 0.5,
            "k_path": None,
        }
        recipe = Recipe(
            demo,
            tmp_path_factory.mktemp("out") / "out.gguf",
            "palu",
            options,
            calib=(demo / "sample-calib.txt",),
            calib_tokens=4096,
            fisher_tokens=2048,
            calib_window=512,
        )
        method = methods.module("palu").create(options, source.spec)
        stats, _ = calibrate.collect(method.needs, recipe, source)
        work = Work(source, stats, 0, method.decompose)
        model.load_state_dict(whole)
        with reference.compressed(model, work, method.plan(work)) as cut:
            found[choice] = reference.divergence(original, reference.log_probabilities(cut, windows))
    return found


def test_joint_groups_beat_single_heads(scores: dict[tuple[Any, ...], float]) -> None:
    assert 2 * scores[None, "uniform", "whitened"] < scores[1, "uniform", "whitened"]


def test_outputs_are_a_better_guide_than_weights(scores: dict[tuple[Any, ...], float]) -> None:
    assert 2 * scores[None, "uniform", "whitened"] < scores[None, "uniform", "plain"]


def test_half_of_the_dimensions_cost_little(scores: dict[tuple[Any, ...], float]) -> None:
    assert 0 < scores[None, "uniform", "whitened"] < 0.1
    assert 0 < scores[None, "fisher", "whitened"] < 0.1
