"""What mixes tokens in a layer, where it is not usual attention. A recurrent mixer is a module with its name
in the schema's `enums.mixer` and a function

    mixed(live, spec, x) -> Tensor   live: a layer (decoder.py); x [n, T, d], normed -> the branch [n, T, d]
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor

from ...ir import ModelSpec


def mixed(name: str, live: Any, spec: ModelSpec, x: Tensor) -> Tensor:
    """The branch of the recurrent mixer of this name."""
    branch: Tensor = import_module(f"{__name__}.{name}").mixed(live, spec, x)
    return branch
