"""Architectures: one module per transformers `model_type`; the directory is the registry.

A module `archs/<model_type>.py` provides

    TINY: dict                       config of a random checkpoint small enough for a test
    def model_spec(config) -> ModelSpec

`config` is config.json as it is on disk. Anything the one native block cannot do raises ConvertError here.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from ..errors import ConvertError
from ..ir import ModelSpec

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    """The decoder that `config` describes.

    Raises:
        ConvertError: an unknown model_type, a missing field, or a feature outside the block description.
    """
    model_type = str(config["model_type"])
    if model_type not in names():
        raise ConvertError("architecture", f"a model_type of {', '.join(names())}", model_type)
    try:
        spec: ModelSpec = importlib.import_module(f"{__name__}.{model_type}").model_spec(config)
    except KeyError as error:
        raise ConvertError("config.json", f"the field {error.args[0]}", "none") from None
    except (TypeError, ValueError) as error:
        raise ConvertError(
            "config.json", f"fields as transformers writes them for {model_type}", str(error)
        ) from None
    if spec.n_kv < 1 or spec.n_head % spec.n_kv:
        raise ConvertError(
            "config.json", "query heads divisible by KV heads", f"{spec.n_head} and {spec.n_kv}"
        )
    return spec


def tiny(model_type: str) -> dict[str, Any]:
    config: dict[str, Any] = importlib.import_module(f"{__name__}.{model_type}").TINY
    return config


def activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise ConvertError("config.json", f"an activation of {', '.join(ACTIVATIONS)}", name)
    return ACTIVATIONS[name]
