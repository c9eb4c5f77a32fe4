"""apertus1p5: Apertus 1.5, text (8B).

Apertus, whose output has no rows for tokens of pictures and sounds. Files leave these tokens out: they are
the last ones, so that others keep their numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from .... import limits
from ....ir import ModelSpec
from .. import require
from . import apertus

TEXT_PREFIX = "model.language_model"


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    n_whole = int(config.get("vocab_size", 266752))
    kept = config.get("output_vocab_size") or n_whole
    n_vocab = int(limits.number("config.json", "output_vocab_size", kept, 1, n_whole))
    spec = apertus.model_spec({**config, "vocab_size": n_vocab})
    if n_vocab == n_whole:
        return spec
    require(config, "tie_word_embeddings", False, False)
    rows = np.arange(n_vocab)
    return replace(
        spec,
        global_tensors=tuple(
            replace(role, rows=rows) if role.target == "token_embd.weight" else role
            for role in spec.global_tensors
        ),
    )
