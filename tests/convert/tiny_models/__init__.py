"""By model_type the config of a random checkpoint that a test makes in a second. Of every architecture, with
head_dim != hidden / heads where transformers and llama.cpp know such."""

from __future__ import annotations

from typing import Any

from . import dense, mla, pictures, recurrent, routed

TINY: dict[str, dict[str, Any]] = {
    **dense.TINY,
    **routed.TINY,
    **mla.TINY,
    **recurrent.TINY,
    **pictures.TINY,
}
