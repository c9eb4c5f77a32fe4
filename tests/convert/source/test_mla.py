"""Multi-head latent attention: DeepSeek V2 and V3, GLM-4.7-Flash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from both import N, distance, expected_logits, run, session, step_by_step, token_ids

from conftest import Tiny
from latentkv_convert.calibrate.decoder import Decoder
from latentkv_convert.source.checkpoint_source import CheckpointSource

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
YARN |= {"beta_fast": 32, "beta_slow": 1}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("deepseek_v2", {}),
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "q_lora_rank": 48}),
    ("deepseek_v2", {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}),
    ("deepseek_v3", {}),
    ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "n_group": 1, "topk_group": 1}),
    ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 0.5, "mscale_all_dim": 0.8}, "norm_topk_prob": False}),
    ("deepseek_v3", {"rope_parameters": YARN, "q_lora_rank": None, "first_k_dense_replace": 2}),
    ("deepseek_v3", {"first_k_dense_replace": 3}),
    ("glm4_moe_lite", {}),
    ("glm4_moe_lite", {"tie_word_embeddings": True, "mlp_layer_types": ["sparse"] * 3}),
]


@pytest.mark.parametrize(("model_type", "config"), VARIANTS, ids=str)
def test_logits_equal_transformers(model_type: str, config: dict[str, Any], tiny: Tiny, tmp_path: Path) -> None:
    checkpoint, ids = tiny(model_type, **config), token_ids()
    expected = expected_logits(checkpoint, ids)
    with torch.no_grad():
        streamed = Decoder(CheckpointSource(checkpoint))(torch.tensor([ids]))[0].numpy()
    assert distance(streamed, expected) < 2e-5
    model = run(checkpoint, tmp_path / "plain.gguf", "--method", "none")
    assert distance(session(model).decode(ids, output="all"), expected) < 1e-4
    assert distance(session(model, implementation="reference").decode(ids, output="all"), expected) < 1e-4
    assert distance(step_by_step(model, ids, N - 20), expected[N - 21 :]) < 1e-4
    live = session(model)
    chunks = [live.decode(ids[begin : begin + 50], output="all") for begin in range(0, N, 50)]
    assert distance(np.concatenate(chunks), expected) < 1e-4
