"""What a conversion needs from a model, whatever the model is stored in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..ir import F32, Array, ModelSpec


@dataclass(frozen=True)
class Stored:
    """A tensor as the source stores it. `data`: its bytes in one of ggml's types, rows in the file's
    order."""

    type: str  # q4_k …, as ggml writes it
    data: Callable[[], Array]


class Source(Protocol):
    """A decoder and its vocabulary. A tensor's role is its name in a stock GGUF without `blk.N.`, and `layer`
    that N; rows of heads are in transformers' order (planes i, i + n_rot/2), Q, K and V always apart."""

    spec: ModelSpec
    outtype: str  # of weights that are computed, where no other is asked for

    @property
    def factors(self) -> Mapping[str, str]:
        """Weights -> tensors that products with them, as they are stored, are multiplied with."""
        ...

    @property
    def beside(self) -> tuple[str, ...]:
        """Names of tensors outside the layers that are copied as they are stored."""
        ...

    @property
    def note(self) -> str:
        """One line about parts of the model that are left out, or ""."""
        ...

    def has(self, role: str, layer: int | None = None) -> bool: ...

    def tensor(self, role: str, layer: int | None = None) -> F32:
        """Raises:
        ConvertError: it is missing, of another shape, or not finite.
        """
        ...

    def columns(self, role: str, part: slice) -> F32:
        """Some columns of a tensor that belongs to no layer."""
        ...

    def shape(self, role: str, layer: int | None = None) -> tuple[int, ...]:
        """NumPy's order, the reverse of GGUF's ne."""
        ...

    def stored(self, role: str, layer: int | None = None) -> Stored | None:
        """The tensor to copy as it is; None if weights of this source are encoded anew. It also takes the
        role attn_qkv if the spec is packed."""
        ...

    def keys(self) -> Mapping[str, Any]:
        """general.*, tokenizer.* and the architecture's own keys of the file."""
        ...

    def encode(self, text: str) -> Sequence[int]:
        """Token ids. No special token is added; those that the text spells out, as a chat template writes
        them, are tokens."""
        ...

    def bos(self) -> int | None:
        """What the tokenizer starts a text with."""
        ...

    def identity(self) -> str:
        """A hash of the model, under which its statistics are kept."""
        ...
