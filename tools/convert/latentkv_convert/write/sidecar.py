"""A sidecar: a file that holds what a latent cache adds to a GGUF (docs/gguf.md, Sidecars)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .. import native
from ..errors import ConvertError
from ..recipe import Recipe
from ..schema import KEYS
from ..source.source import Source
from ..weights.encoding import Encoding, split
from ..weights.tensor import OutTensor, encode


def base_keys(recipe: Recipe) -> dict[str, str]:
    """Keys by which a sidecar recognizes its base, the recipe's source.

    Raises:
        ConvertError: a source that cannot be a base, or options that would change its weights.
    """
    source = recipe.source
    if source.is_dir():
        expected = "a GGUF, whose weights the runtime opens beside the sidecar"
        hint = "write one first: --method none -o base.gguf"
        raise ConvertError("--sidecar", expected, f"the checkpoint directory {source.name}", hint)
    if recipe.method == "none":
        raise ConvertError("--sidecar", "a method that makes factors", "--method none")
    if recipe.outtype is not None:
        raise ConvertError("--sidecar", "weights that stay in the GGUF", f"--outtype {recipe.outtype}")
    core = native.core("--sidecar", "the runtime's hash of a GGUF")
    try:
        return {KEYS["base_hash"]: core.content_hash(str(source)), KEYS["base_name"]: source.name}
    except core.Error as error:
        raise ConvertError("--sidecar", "a GGUF that the runtime opens", str(error)) from None


def keys(base: Mapping[str, str], written: Mapping[str, Any]) -> dict[str, Any]:
    """The latentkv.* keys of a complete file, and those of the base."""
    ours = {key: value for key, value in written.items() if key.startswith("latentkv.")}
    name = {key: written[key] for key in ("general.name",) if key in written}
    return {"general.type": "adapter", **name, **base, **ours}


def tensors(source: Source, written: Sequence[OutTensor], encoding: Encoding) -> list[OutTensor]:
    """The tensors of a complete file that the source does not already have."""
    return [tensor for tensor in written if not _is_held(source, tensor, encoding)]


def _is_held(source: Source, tensor: OutTensor, encoding: Encoding) -> bool:
    if tensor.stored is not None:
        return True
    layer, role = split(tensor.name)
    held, kind = source.stored(role, layer), encoding.type_of(tensor)
    if held is None or held.type != kind:
        return False
    made = encode(tensor.load(), kind, tensor.name)
    return bool(np.array_equal(made.view(np.uint8).ravel(), held.data().view(np.uint8).ravel()))
