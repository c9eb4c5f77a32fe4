"""What a conversion asks of a model, whatever it is stored in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..ir import F32, ModelSpec


class Source(Protocol):
    """A decoder and its vocabulary. A tensor's role is its name in a stock GGUF without `blk.N.`, and `layer`
    that N; rows of heads are in transformers' order (planes i, i + n_rot/2), Q, K and V always apart."""

    spec: ModelSpec
    outtype: str  # of weights that are computed, where no other is asked for

    def has(self, role: str, layer: int | None = None) -> bool: ...

    def tensor(self, role: str, layer: int | None = None) -> F32:
        """Raises:
        ConvertError: it is missing, of another shape, or not finite.
        """
        ...

    def shape(self, role: str, layer: int | None = None) -> tuple[int, ...]:
        """NumPy's order, the reverse of GGUF's ne."""
        ...

    def keys(self) -> Mapping[str, Any]:
        """general.*, tokenizer.* and the architecture's own keys of the file."""
        ...

    def encode(self, text: str) -> Sequence[int]:
        """Token ids without special tokens."""
        ...

    def bos(self) -> int | None:
        """What the tokenizer starts a text with."""
        ...

    def identity(self) -> str:
        """A hash of the model, to find its statistics by."""
        ...


def open_source(path: Path, pre: str | None = None) -> Source:
    """A checkpoint directory. pre: its `tokenizer.ggml.pre`.

    Raises:
        ConvertError: one that cannot be converted.
    """
    from .checkpoint_source import CheckpointSource

    return CheckpointSource(path, pre)
