"""A model runs in one process with PyTorch, whichever of them used the processor's matrix unit last."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from both import run, session, token_ids

from conftest import Tiny


@pytest.mark.parametrize("weights", ["q8_0", "q4_0"])
def test_products_in_bf16_between_two_decodes(random_checkpoint: Tiny, tmp_path: Path, weights: str) -> None:
    """Both run on one thread. PyTorch sets up the matrix unit for itself and leaves it so."""
    directory = random_checkpoint(tmp_path, "llama", hidden_size=256, intermediate_size=512)
    model = run(directory, tmp_path / "m.gguf", "--method", "none", "--outtype", weights)
    ids = token_ids(64)
    before = session(model).decode(ids, output="all")
    a = torch.ones(256, 256, dtype=torch.bfloat16)
    assert float((a @ a)[0, 0]) == 256
    assert np.array_equal(session(model).decode(ids, output="all"), before)
