"""What depends on the length of a sequence alone: RoPE's tables, and which keys a query sees."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..ir import F64, LayerRope, ModelSpec
from ..source.frequencies import frequencies, magnitude, temperatures


class Positions:
    """Positions in sequences of `n` tokens, for every layer; layers that attend alike share theirs. begin:
    the position of the first token."""

    def __init__(self, spec: ModelSpec, n: int, device: torch.device, begin: int = 0) -> None:
        self._spec, self._n, self._device, self._begin = spec, n, device, begin
        self._known: dict[tuple[int, LayerRope, int], LayerPositions] = {}

    def of(self, layer: int) -> LayerPositions:
        kind = (self._spec.window(layer), self._spec.rope(layer), self._spec.at(layer).n_rot)
        if kind not in self._known:
            self._known[kind] = LayerPositions(self._spec, layer, self._n, self._device, self._begin)
        return self._known[kind]


class LayerPositions:
    """`mask` [1, 1 or n_head, T, T]: None where a query sees all tokens up to its own."""

    def __init__(self, spec: ModelSpec, layer: int, n: int, device: torch.device, begin: int = 0) -> None:
        self.n_rot = spec.at(layer).n_rot if spec.rope(layer).base else 0
        self.mask = _mask(spec, spec.window(layer), n, device)
        factors = temperatures(spec, begin + n)
        self._factors = None if factors is None else _table(factors[begin:], device)[:, None]
        if self.n_rot:
            angles = np.arange(begin, begin + n)[:, None] * frequencies(spec, begin + n, layer)[None, :]
            both, scale = np.concatenate([angles, angles], axis=1), magnitude(spec, layer)
            self.cos = _table(np.cos(both) * scale, device)
            self.sin = _table(np.sin(both) * scale, device)

    def queries(self, heads: Tensor) -> Tensor:
        """[n, heads, T, head_dim] as they meet keys."""
        return self.with_rope(heads if self._factors is None else heads * self._factors)

    def with_rope(self, heads: Tensor) -> Tensor:
        """[n, heads, T, head_dim] after RoPE over planes (i, i + n_rot/2)."""
        if not self.n_rot:
            return heads
        x, rest = heads[..., : self.n_rot], heads[..., self.n_rot :]
        first, second = x.chunk(2, dim=-1)
        x = x * self.cos + torch.cat([-second, first], dim=-1) * self.sin
        return x if not rest.shape[-1] else torch.cat([x, rest], dim=-1)


def _table(values: F64, device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.float32)).to(device)


def _mask(spec: ModelSpec, window: int, n: int, device: torch.device) -> Tensor | None:
    window = window or n
    if window >= n and spec.block.position != "alibi":
        return None
    at = torch.arange(n, device=device)
    seen = (at[None, :] <= at[:, None]) & (at[:, None] - at[None, :] < window)
    if spec.block.position != "alibi":
        return seen[None, None]
    slopes = _slopes(spec.n_head, float(spec.keys["attention.max_alibi_bias"])).to(device)
    bias = slopes[:, None, None] * at[None, None, :]  # less the query's own position, which softmax removes
    return bias.expand(-1, n, -1).masked_fill(~seen, float("-inf"))[None]


def _slopes(n_head: int, max_bias: float) -> Tensor:
    """ALiBi (Press et al. 2022) for any number of heads, as ggml_soft_max_ext has them."""
    power = 1 << (n_head.bit_length() - 1)
    first = [2.0 ** (-max_bias / power * (head + 1)) for head in range(power)]
    second = [2.0 ** (-max_bias / 2 / power * (2 * head + 1)) for head in range(n_head - power)]
    return torch.tensor(first + second)
