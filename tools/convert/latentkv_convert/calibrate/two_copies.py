"""Attention over two copies of every token: an exact one, read by queries inside the recent window and for
sinks, and the cached body copy, read by every later query.

While it is active it takes the place of scaled_dot_product_attention, so a decoder needs no code of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..errors import ConvertError
from .attention import attention, capped, softmax
from .carried import Rows, handed

_BLOCK = 64  # queries at once: scores of a block stay in the processor's cache
_SCORES = 1 << 27  # of all heads at once elsewhere


@dataclass(frozen=True)
class Body:
    """Keys that a block of queries reads from the body copy: all of it those of `whole`, and those of `edge`
    where mask [queries, keys of the edge] says so."""

    whole: slice
    edge: slice
    mask: Tensor


@dataclass(frozen=True)
class Scores:
    """What products of queries and keys become before the softmax, and what takes part in it."""

    mask: Tensor | None  # [1, 1 or n_head, T, T]
    is_causal: bool
    scale: float
    sinks: Tensor | None = None  # [n_head]
    softcap: float = 0.0  # of scores, 0: none

    @property
    def is_plain(self) -> bool:
        """Whether torch's own attention does all of it."""
        return self.sinks is None and not self.softcap

    def repeated(self, n: int) -> Scores:
        """For n times as many heads."""
        mask = self.mask
        if mask is not None and mask.shape[1] > 1:
            mask = mask.repeat(1, n, 1, 1)
        return replace(self, mask=mask, sinks=None if self.sinks is None else self.sinks.repeat(n))


class TwoCopies(TorchFunctionMode):
    """`copy`: what the body copies hold (k after RoPE, v), each [n, n_kv, T, head_dim]; None: the exact
    values. `exact`: what is read in their place, likewise; None: what the model makes. `batch`: how many
    tokens leave the recent window at once. With more than one the window is the decoding cache's: `recent`
    tokens stay when a batch goes, and as many join them before the next one does. `reduced`: on the way back
    products are of bf16 numbers, but for the scores.

    After a forward pass `key` and `value` are what the model attended to. A backward pass reaches `copy` and
    `exact`, too. After it `key_slope` and `value_slope` [1, n_kv, T, head_dim] are the loss's gradients
    through the body copies alone, of one sequence.
    """

    def __init__(
        self,
        n_kv: int,
        sink: int,
        recent: int,
        copy: tuple[Tensor, Tensor] | None = None,
        batch: int = 1,
        exact: tuple[Tensor, Tensor] | None = None,
        reduced: bool = False,
    ) -> None:
        super().__init__()
        self.batch, self.exact, self.reduced = batch, exact, reduced
        self.n_kv, self.sink, self.recent, self.copy = n_kv, sink, recent, copy
        self.key: Tensor | None = None
        self.value: Tensor | None = None
        self.key_slope: Tensor | None = None
        self.value_slope: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            return self.attend(*_of_torch(*args, **(kwargs or {})))
        if func is attention:
            query, key, value, sinks, softcap, mask, is_causal, scale = args
            return self.attend(query, key, value, Scores(mask, is_causal, scale, sinks, softcap))
        if func is handed:
            exact: Rows = self.exact or args
            return exact, self.copy or exact
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

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """query [n, n_head, T, head_dim], key and value [n, n_kv or n_head, T, head_dim]."""
        if self.exact is not None:
            key, value = (_repeated(each, key.shape[1]) for each in self.exact)
        self.key, self.value = key, value
        old = (self.old(side, key.shape[1]) for side in (0, 1))
        n, rows = len(query), (query, key, value, *old)
        if n > 1:  # sequences are as more heads of one
            rows = tuple(None if each is None else each.flatten(0, 1)[None] for each in rows)
            scores = scores.repeated(n)
        output: Tensor = _Attention.apply(*rows, self, scores)
        return output if n == 1 else output.unflatten(1, (n, -1))[0]

    def oldest(self, query: Any) -> Any:
        """The first key that a query, or each of several, does not read from the body."""
        if self.batch == 1:
            return query - self.recent + 1  # the recent window's first
        return self.sink + (query - self.sink - self.recent) // self.batch * self.batch

    def body(self, rows: slice, n: int, device: torch.device) -> Body:
        """What a block of queries reads of n keys."""
        low, high = (min(max(self.oldest(query), self.sink), n) for query in (rows.start, rows.stop - 1))
        query = torch.arange(rows.start, rows.stop, device=device)[:, None]
        edge = torch.arange(low, high, device=device) < self.oldest(query)
        return Body(slice(min(self.sink, low), low), slice(low, high), edge)

    def per_kv_head(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.n_kv, -1)).sum(2)  # of n sequences, n neighbouring heads: not read

    def old(self, side: int, heads: int) -> Tensor | None:
        """The copies of k (0) or v (1) as [n, heads, T, head_dim]."""
        return None if self.copy is None else _repeated(self.copy[side], heads)


def _of_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Scores]:
    """The arguments of scaled_dot_product_attention, as `attend` takes them."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return query, key, value, Scores(attn_mask, is_causal, scale)


def _repeated(x: Tensor, heads: int) -> Tensor:
    """[n, n_kv, T, head_dim] -> [n, heads, T, head_dim]"""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


class _Attention(torch.autograd.Function):
    """softmax(q kᵀ · scale) v in blocks of queries, scores computed anew on the way back."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        old_key: Tensor | None,
        old_value: Tensor | None,
        nodes: TwoCopies,
        scores: Scores,
    ) -> Tensor:
        ctx.nodes, ctx.scores = nodes, scores
        if old_key is None and scores.is_plain:
            output = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, scores.mask, 0.0, scores.is_causal, scale=scores.scale, enable_gqa=True
            )
            ctx.save_for_backward(query, key, value, output, None, None)
            return output
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        values = _Mixed(value, old_value)
        for rows, weights, body, _ in _blocks(query, key, old_key, nodes, scores):
            mixed = weights @ values.of(body, weights.shape[-1])
            if values.old is not None:
                read = weights[:, :, body.edge] * body.mask
                mixed += read @ values.difference(body)
            output[0, :, rows] = mixed.unflatten(1, (-1, rows.stop - rows.start)).flatten(0, 1)
        ctx.save_for_backward(query, key, value, output, old_key, old_value)
        return output

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, old_key, old_value = ctx.saved_tensors
        nodes: TwoCopies = ctx.nodes
        scale = ctx.scores.scale
        factor = torch.bfloat16 if nodes.reduced else query.dtype
        keys, values = (_Mixed(*pair, factor) for pair in ((key, old_key), (value, old_value)))
        d_query, d_key, d_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        key_slope, value_slope = torch.zeros_like(key), torch.zeros_like(value)
        repeats = query.shape[1] // key.shape[1]
        for rows, weights, body, steepness in _blocks(query, key, old_key, nodes, ctx.scores):
            n = weights.shape[-1]
            own = (_grouped(query[:, :, rows], repeats) * scale).to(factor)
            above = _grouped(slopes[0][:, :, rows], repeats)
            whole = (above * _grouped(output[:, :, rows], repeats)).sum(-1, keepdim=True)
            above = above.to(factor)
            d_scores = (above @ values.of(body, n).mT).float()
            if values.old is not None:
                d_scores[:, :, body.edge] += (above @ values.difference(body).mT).float() * body.mask
            d_scores = d_scores.sub_(whole).mul_(weights)
            if steepness is not None:
                d_scores = d_scores.mul_(steepness)
            d_scores = d_scores.to(factor)
            mixed = (d_scores @ keys.of(body, n)).float()
            if keys.old is not None:
                mixed += ((d_scores[:, :, body.edge] * body.mask) @ keys.difference(body)).float()
            d_query[0, :, rows] = (mixed * scale).unflatten(1, (repeats, -1)).flatten(0, 1)
            _add(d_key[0], key_slope[0], d_scores, own, body)
            _add(d_value[0], value_slope[0], weights.to(factor), above, body)
        nodes.key_slope, nodes.value_slope = nodes.per_kv_head(key_slope), nodes.per_kv_head(value_slope)
        if old_key is None:
            return d_query, d_key, d_value, None, None, None, None
        return d_query, d_key - key_slope, d_value - value_slope, key_slope, value_slope, None, None


def _add(slope: Tensor, of_body: Tensor, pairs: Tensor, rows: Tensor, body: Body) -> None:
    """Pairs [KV heads, queries, keys] times rows, to the keys' gradients, and to those through the body."""
    all_keys = pairs.mT @ rows
    slope[:, : pairs.shape[-1]] += all_keys
    of_body[:, body.whole] += all_keys[:, body.whole]
    of_body[:, body.edge] += (pairs[:, :, body.edge] * body.mask).mT @ rows


class _Mixed:
    """k or v [KV heads, keys, head_dim], exact but for keys that a block of queries reads from the body
    alone. Blocks come in order, so these only become more."""

    def __init__(self, exact: Tensor, old: Tensor | None, factor: torch.dtype | None = None) -> None:
        self.exact, self.old = exact[0].to(factor), None if old is None else old[0].to(factor)
        self._rows = self.exact if self.old is None else self.exact.clone()

    def of(self, body: Body, n: int) -> Tensor:
        if self.old is not None:
            self._rows[:, body.whole] = self.old[:, body.whole]
        return self._rows[:, :n]

    def difference(self, body: Body) -> Tensor:
        """Old less exact, of the edge."""
        assert self.old is not None
        return self.old[:, body.edge] - self.exact[:, body.edge]


def _grouped(x: Tensor, repeats: int) -> Tensor:
    """[1, n_head, rows, head_dim] -> [KV heads, repeats·rows, head_dim]"""
    return x[0].unflatten(0, (-1, repeats)).flatten(1, 2)


def _blocks(
    query: Tensor, key: Tensor, old_key: Tensor | None, nodes: TwoCopies, of: Scores
) -> Iterator[tuple[slice, Tensor, Body, Tensor | None]]:
    """Per block of queries: its rows; softmax weights [KV heads, repeats·rows, keys]; which of these are read
    from the body, with a mask of [repeats·rows, keys of the edge]; and the derivative of the soft cap."""
    n_head, n = query.shape[1:3]
    repeats = n_head // key.shape[1]
    keys = _Mixed(key, old_key)
    size = _BLOCK if query.device.type == "cpu" else max(_BLOCK, _SCORES // (n_head * n))
    for begin in range(0, n, size):
        rows = slice(begin, min(begin + size, n))
        end = rows.stop if of.is_causal else n
        own = _grouped(query[:, :, rows], repeats) * of.scale
        body = nodes.body(rows, end, query.device)
        body = replace(body, mask=body.mask.repeat(repeats, 1))
        scores = own @ keys.of(body, end).mT
        if keys.old is not None:
            edge = own @ keys.old[:, body.edge].mT
            scores[:, :, body.edge] = torch.where(body.mask, edge, scores[:, :, body.edge])
        steepness = None
        if of.softcap:
            scores = capped(scores, of.softcap)
            steepness = 1 - (scores / of.softcap).square()
        if of.is_causal:  # all keys before the block are seen
            own_size = rows.stop - begin
            later = torch.ones(own_size, own_size, dtype=torch.bool, device=query.device).triu(1)
            scores[:, :, begin:].masked_fill_(later.repeat(repeats, 1), float("-inf"))
        elif of.mask is not None:
            part = of.mask[..., rows, :end].expand(1, n_head, -1, -1)
            part = _grouped(part, repeats)
            scores = scores.masked_fill(~part, float("-inf")) if part.dtype == torch.bool else scores + part
        if of.sinks is None:
            weights = scores.softmax(-1)
        else:  # [KV heads, repeats·rows, 1]
            sinks = of.sinks.view(-1, repeats, 1).expand(-1, -1, rows.stop - begin).flatten(1)[..., None]
            weights = softmax(scores, sinks)
        yield rows, weights, body, steepness
