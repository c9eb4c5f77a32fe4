"""What layers pass on beside hidden states, as more channels of these: the token and its embedding, where
tokens bring numbers to every layer, and the K and V that later layers read.

    [state | token's id | its embedding | exact rows | rows that have left the exact window]

Rows are K after RoPE and V of each layer that others read. A model that passes on states alone has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ..ir import ModelSpec

Rows = tuple[Tensor, Tensor]  # K after RoPE and V, each [n, n_kv, T, head_dim]


@dataclass(frozen=True)
class Carried:
    n_embd: int
    brings: bool  # tokens bring numbers to layers
    heads: Mapping[int, tuple[int, int]]  # layer that others read -> n_kv, head_dim

    @staticmethod
    def of(spec: ModelSpec) -> Carried | None:
        """None: hidden states are all."""
        brings = bool(spec.keys.get("embedding_length_per_layer_input"))
        if not brings and not spec.has_shared_kv:
            return None
        read = sorted({spec.rows_of(layer) for layer in range(spec.n_layer) if spec.at(layer).shares_kv})
        return Carried(spec.n_embd, brings, {i: (spec.at(i).n_kv, spec.at(i).head_dim) for i in read})

    @property
    def begin(self) -> int:
        """Of rows."""
        return self.n_embd + (1 + self.n_embd) * self.brings

    @property
    def _widths(self) -> list[int]:
        return [2 * n_kv * head_dim for n_kv, head_dim in self.heads.values()]

    @property
    def width(self) -> int:
        return self.begin + 2 * sum(self._widths)

    def _places(self, layer: int) -> tuple[slice, slice]:
        """Exact rows and old ones of a layer."""
        ends = list(accumulate(self._widths, initial=self.begin))
        at, whole = list(self.heads).index(layer), sum(self._widths)
        return slice(ends[at], ends[at + 1]), slice(ends[at] + whole, ends[at + 1] + whole)

    def embedded(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Embeddings [n, T, d] of tokens [n, T], as the first layer takes them."""
        brought = [tokens[..., None].to(x), x] if self.brings else []
        return torch.cat([x, *brought, x.new_zeros(*x.shape[:-1], self.width - self.begin)], dim=-1)

    def token(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Ids [n, T] and embeddings [n, T, d]."""
        return x[..., self.n_embd].long(), x[..., self.n_embd + 1 : self.begin]

    def rows(self, x: Tensor, layer: int) -> tuple[Rows, Rows]:
        """Exact rows and old ones of a layer."""
        n_kv, head_dim = self.heads[layer]

        def heads(place: slice) -> Rows:
            k, v = x[..., place].unflatten(-1, (2, n_kv, head_dim)).permute(2, 0, 3, 1, 4)
            return k, v

        exact, old = map(heads, self._places(layer))
        return exact, old

    def with_rows(self, x: Tensor, layer: int, key: Tensor, value: Tensor) -> Tensor:
        """x with what readers get of the K and V that a layer makes."""
        exact, old = handed(key, value)
        flat = [torch.stack(rows, dim=1).permute(0, 3, 1, 2, 4).flatten(2) for rows in (exact, old)]
        first, second = self._places(layer)
        parts = [x[..., : first.start], flat[0], x[..., first.stop : second.start], flat[1]]
        return torch.cat([*parts, x[..., second.stop :]], dim=-1)

    def kept(self, x: Tensor, layer: int) -> Tensor:
        """Of the input of a layer of the uncompressed model what `whole` cannot make."""
        made = [x[..., self._places(each)[0]] for each in self.heads if each < layer]
        return torch.cat([x[..., : self.n_embd], *made], dim=-1)

    def whole(self, x: Tensor, embedded: Tensor) -> Tensor:
        """What was kept, as a layer takes it; embedded: what the first layer takes."""
        exact = x[..., self.n_embd :]
        filled = embedded.clone()
        filled[..., : self.n_embd] = x[..., : self.n_embd]
        for begin in (self.begin, self.begin + sum(self._widths)):
            filled[..., begin : begin + exact.shape[-1]] = exact
        return filled


def handed(key: Tensor, value: Tensor) -> tuple[Rows, Rows]:
    """Exact rows and old ones, as later layers read what a layer makes. Modes may take its place."""
    if has_torch_function((key, value)):
        taken: Any = handle_torch_function(handed, (key, value), key, value)
        return taken  # type: ignore[no-any-return]
    return (key, value), (key, value)
