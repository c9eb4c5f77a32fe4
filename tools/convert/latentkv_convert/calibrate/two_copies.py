"""Attention over two copies of every token: an exact one, read by queries inside the recent window and for
sinks, and the cached body copy, read by every later query.

While it is active it takes the place of scaled_dot_product_attention, so a decoder needs no code of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..errors import ConvertError

_BLOCK = 128  # queries at once: scores of a block stay in the processor's cache


class TwoCopies(TorchFunctionMode):
    """`copy`: what the body copies hold (k after RoPE, v), each [1, n_kv, T, head_dim]; None: the exact
    values. `batch`: how many tokens leave the recent window at once. With more than one the window is the
    decoding cache's: `recent` tokens stay when a batch goes, and as many join them before the next one does.

    After a forward pass `key` and `value` are what the model attended to. After a backward pass through it
    `key_slope` and `value_slope` [1, n_kv, T, head_dim] are the loss's gradients through the body copies
    alone.
    """

    def __init__(
        self,
        n_kv: int,
        sink: int,
        recent: int,
        copy: tuple[Tensor, Tensor] | None = None,
        batch: int = 1,
    ) -> None:
        super().__init__()
        self.batch = batch
        self.n_kv, self.sink, self.recent, self.copy = n_kv, sink, recent, copy
        self.key: Tensor | None = None
        self.value: Tensor | None = None
        self.key_slope: Tensor | None = None
        self.value_slope: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            return self.attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def found(self) -> tuple[Tensor, Tensor]:
        """Key and value of the pass.

        Raises:
            ConvertError: the layer attended in no way that is known here.
        """
        if self.key is None or self.value is None:
            raise ConvertError("attention", "scaled_dot_product_attention", "none")
        return self.key, self.value

    def slopes(self) -> tuple[Tensor, Tensor]:
        """key_slope and value_slope after a backward pass."""
        assert self.key_slope is not None
        assert self.value_slope is not None
        return self.key_slope, self.value_slope

    def attend(
        self,
        query: Tensor,  # [1, n_head, T, head_dim]
        key: Tensor,  # [1, n_kv or n_head, T, head_dim]
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        self.key, self.value = key, value
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        output: Tensor = _Attention.apply(query, key, value, self, attn_mask, is_causal, scale)
        return output

    def body(self, begin: int, end: int, n: int, device: torch.device) -> Tensor:
        """[queries begin … end, n keys]: pairs that meet through the body copy."""
        query, key = torch.arange(begin, end, device=device)[:, None], torch.arange(n, device=device)
        oldest = query - self.recent + 1  # of the recent window
        if self.batch > 1:
            oldest = self.sink + (query - self.sink - self.recent) // self.batch * self.batch
        return (key >= self.sink) & (key < oldest)

    def per_kv_head(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.n_kv, -1)).sum(2)

    def old(self, side: int, heads: int) -> Tensor | None:
        """The copies of k (0) or v (1) as [1, heads, T, head_dim]."""
        return None if self.copy is None else _repeated(self.copy[side], heads)


def _repeated(x: Tensor, heads: int) -> Tensor:
    """[1, n_kv, T, head_dim] -> [1, heads, T, head_dim]"""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


class _Attention(torch.autograd.Function):
    """softmax(q kᵀ · scale) v in blocks of queries, scores computed anew on the way back."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        nodes: TwoCopies,
        mask: Tensor | None,
        is_causal: bool,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.nodes, ctx.mask, ctx.is_causal, ctx.scale = nodes, mask, is_causal, scale
        output = torch.empty_like(query)
        old = nodes.old(1, key.shape[1])
        for rows, weights, body in _blocks(query, key, nodes, mask, is_causal, scale):
            n = weights.shape[-1]
            if old is None:
                mixed = weights @ value[0, :, :n]
            else:
                mixed = (weights * ~body) @ value[0, :, :n] + (weights * body) @ old[0, :, :n]
            output[0, :, rows] = mixed.unflatten(1, (-1, rows.stop - rows.start)).flatten(0, 1)
        return output

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        nodes: TwoCopies = ctx.nodes
        d_query, d_key, d_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        key_slope, value_slope = torch.zeros_like(key), torch.zeros_like(value)
        repeats = query.shape[1] // key.shape[1]
        for rows, weights, body in _blocks(query, key, nodes, ctx.mask, ctx.is_causal, ctx.scale):
            n = weights.shape[-1]
            own = _grouped(query[:, :, rows], repeats) * ctx.scale
            above = _grouped(slopes[0][:, :, rows], repeats)
            d_weights = above @ value[0, :, :n].mT
            d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True))
            mixed = (d_scores @ key[0, :, :n]) * ctx.scale
            d_query[0, :, rows] = mixed.unflatten(1, (repeats, -1)).flatten(0, 1)
            d_key[0, :, :n] += d_scores.mT @ own
            d_value[0, :, :n] += weights.mT @ above
            n = max(0, min(n, rows.stop - nodes.recent))  # no later key is old to any query of the block
            key_slope[0, :, :n] += (d_scores * body)[:, :, :n].mT @ own
            value_slope[0, :, :n] += (weights * body)[:, :, :n].mT @ above
        nodes.key_slope, nodes.value_slope = nodes.per_kv_head(key_slope), nodes.per_kv_head(value_slope)
        return d_query, d_key, d_value, None, None, None, None


def _grouped(x: Tensor, repeats: int) -> Tensor:
    """[1, n_head, rows, head_dim] -> [KV heads, repeats·rows, head_dim]"""
    return x[0].unflatten(0, (-1, repeats)).flatten(1, 2)


def _blocks(
    query: Tensor, key: Tensor, nodes: TwoCopies, mask: Tensor | None, is_causal: bool, scale: float
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Per block of queries: its rows; softmax weights [KV heads, repeats·rows, keys]; which pairs are body
    reads [repeats·rows, keys]."""
    n_head, n = query.shape[1:3]
    repeats = n_head // key.shape[1]
    old = nodes.old(0, key.shape[1])
    for begin in range(0, n, _BLOCK):
        rows = slice(begin, min(begin + _BLOCK, n))
        end = rows.stop if is_causal else n
        own = _grouped(query[:, :, rows], repeats)
        body = nodes.body(begin, rows.stop, end, query.device).repeat(repeats, 1)
        scores = own @ key[0, :, :end].mT
        if old is not None:
            scores = torch.where(body, own @ old[0, :, :end].mT, scores)
        scores = scores.mul_(scale)
        if is_causal:
            later = torch.ones(rows.stop - begin, end, dtype=torch.bool, device=query.device).triu(begin + 1)
            scores = scores.masked_fill_(later.repeat(repeats, 1), float("-inf"))
        elif mask is not None:
            part = mask[..., rows, :end].expand(1, n_head, -1, -1)
            part = _grouped(part, repeats)
            scores = scores.masked_fill(~part, float("-inf")) if part.dtype == torch.bool else scores + part
        yield rows, scores.softmax(-1), body
