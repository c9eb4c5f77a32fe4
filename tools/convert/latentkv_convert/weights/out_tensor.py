"""A tensor of the file to be written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..ir import F32
from ..source.source import Stored


@dataclass(frozen=True)
class OutTensor:
    """`shape` is NumPy's order (the reverse of GGUF's ne); `load` computes the values when their turn
    comes."""

    name: str
    shape: tuple[int, ...]
    kind: str  # weight · table · vector · down (A) · factor (B, E)
    load: Callable[[], F32]
    stored: Stored | None = None  # to be copied, byte for byte, in place of what `load` computes


def unread() -> F32:
    """`load` of a tensor that is only weighed."""
    raise AssertionError("a tensor that is only weighed")
