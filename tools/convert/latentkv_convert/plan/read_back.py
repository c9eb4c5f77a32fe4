"""K and V as readers of a cache that follows a plan get them back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..compute import floats
from ..fuse import center
from ..fuse.rotation import finished
from ..ir import OF_VALUE, SIDES, Plan, SidePlan
from ..rows import sizes
from ..work import Work

if TYPE_CHECKING:
    from torch import Tensor

    from ..calibrate.decoder import Layer
    from ..calibrate.positions import LayerPositions

Rows = tuple["Tensor", "Tensor"]  # k (after RoPE) and v [n, n_kv, T, head_dim]


class Copies:
    """K and V of one layer's input as readers of the cache get them back: of exact tokens, and of those that
    have left the exact window. These come from the former: a row is full when it leaves. replaced: by side,
    other rows than the plan's own."""

    def __init__(
        self, work: Work, plan: Plan, index: int, replaced: Mapping[str, Replaced] | None = None
    ) -> None:
        layer = plan.layers[index]
        self.n_kv, self.mla = work.spec.at(index).n_kv, work.spec.mla
        self.exact = plan.recent_format
        own = {} if replaced is None else replaced
        self.carried = work.spec.rows_of(index) if work.spec.at(index).shares_kv else None
        self.replaced = {
            side: own.get(side) or Replaced(work, layer.side(side), index, side)
            for side in (SIDES if self.carried is None else ())
        }
        self.leaves = plan.recent > 0  # tokens the window
        self.rotated = layer.k.path == "rotated"
        self.of_value = layer.k == OF_VALUE

    def __call__(self, live: Layer, hidden: Tensor, positions: LayerPositions) -> tuple[Rows | None, Rows]:
        """hidden [n, T, d]; n is 1 with MLA. No exact rows: they are what the model makes."""
        if self.carried is not None and live.carried is not None:
            return live.carried.rows(hidden, self.carried)
        x = live.attention_input(hidden)
        if self.mla is not None:
            return self._of_one_row(live, x, positions)
        values = self._projected(live.attn_v, x, "v", lambda rows: live.heads("v", rows))
        with_rope = positions.with_rope
        if self.of_value:
            keys = [with_rope(live.attn_k_norm(rows)) for rows in values]
        elif self.rotated:
            key = with_rope(live.heads("k", live.attn_k(x))).transpose(1, 2)  # [n, T, n_kv, head_dim]
            both = self._both(key.flatten(0, 1).flatten(1), "k")
            keys = [rows.reshape(key.shape).transpose(1, 2) for rows in both]
        else:
            keys = self._projected(live.attn_k, x, "k", lambda rows: with_rope(live.heads("k", rows)))
        read = None if self.exact == "f16" else (keys[0], values[0])
        return read, (keys[1], values[1])

    def _of_one_row(self, live: Layer, x: Tensor, positions: LayerPositions) -> tuple[Rows | None, Rows]:
        """Keys and values of rows that are both."""
        import torch

        from ..calibrate.mixers import mla

        assert self.mla is not None
        turned, latents = mla.rows(live, self.mla, x)
        turned = positions.with_rope(turned[:, None])[0, 0]
        both = zip(self._both(turned, "k"), self._both(latents[0], "v"), strict=True)
        read, old = ((torch.cat(row, dim=-1)[None, None], row[1][None, None]) for row in both)
        return (None if self.exact == "f16" else read), old

    def _projected(
        self, module: Any, x: Tensor, side: str, heads: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """Exact and old rows of a projection's output; what is cached is without its bias."""
        bias = 0 if module.bias is None else module.bias
        both = self._both((module(x) - bias).flatten(0, 1), side)
        return [heads((rows + bias).unflatten(0, x.shape[:2])) for rows in both]

    def _both(self, rows: Tensor, side: str) -> tuple[Tensor, Tensor]:
        """[n, w] as exact tokens are stored, a segment for every head, and as they are when they left."""
        from ..rows import quantizer

        replaced, exact = self.replaced[side], rows
        if self.exact != "f16":
            heads = replaced.about_mean(rows).unflatten(1, (self.n_kv, -1))
            held = quantizer.stored(heads.detach(), self.exact)
            exact = replaced.with_mean(straight_through(heads, held).flatten(1))
        return exact, replaced(exact if self.leaves else rows)


class Replaced:
    """Rows of one layer's K or V as they are read back when they have left the exact window. Without formats:
    as they were in it."""

    def __init__(self, work: Work, plan: SidePlan, layer: int, side: str) -> None:
        moved = partial(floats.tensor, device=work.device)
        self.plan = plan
        self.factors = (
            []
            if plan.formats is None
            else [(moved(b.down), moved(b.up)) for b in finished(work, plan, layer, side)]
        )
        centred = center.centred(work, layer, side, plan.path)
        mean = center.mean(work, layer, side) if centred else None
        self.mean = None if mean is None else moved(mean.astype(np.float32))

    def __call__(self, x: Tensor) -> Tensor:
        """[n, w] -> [n, w]: the projection's output without bias, or a rotated k."""
        import torch

        if self.plan.formats is None:
            return x
        x = self.about_mean(x)
        parts = x.split([len(down) for down, _ in self.factors], dim=1)
        latent = torch.cat(
            [(part.to(down) @ down).float() for part, (down, _) in zip(parts, self.factors, strict=True)], 1
        )
        kept = self.read(latent).split([len(up) for _, up in self.factors], dim=1)
        back = [(part.to(up) @ up).float() for part, (_, up) in zip(kept, self.factors, strict=True)]
        return self.with_mean(torch.cat(back, dim=1))

    def read(self, latent: Tensor) -> Tensor:
        """[n, ranks] what readers get, with gradients straight through."""
        return straight_through(latent, self.held(latent.detach()))

    def held(self, latent: Tensor) -> Tensor:
        """[n, ranks] what a cache returns. Neighbouring segments of one kind are quantized together."""
        import torch

        from ..rows import quantizer

        assert self.plan.formats is not None
        both = zip(self.plan.segments, self.plan.formats, strict=True)
        groups = [tuple(zip(*group, strict=True)) for group in both]
        segments = [segment for group in groups for segment in group]
        if sizes.has_group_scales(name for _, name in segments):
            return quantizer.stored_rows(latent, groups)
        pieces, begin = [], 0
        for (width, name), same in itertools.groupby(segments):
            n = len(list(same))
            part = latent[:, begin : begin + n * width].unflatten(1, (n, width))
            pieces.append(quantizer.stored(part, name).flatten(1))
            begin += n * width
        return torch.cat(pieces, dim=1)

    def about_mean(self, x: Tensor) -> Tensor:
        return x if self.mean is None else x - self.mean

    def with_mean(self, x: Tensor) -> Tensor:
        return x if self.mean is None else x + self.mean


def straight_through(x: Tensor, held: Tensor) -> Tensor:
    """held, what a cache returns for x, with the gradient of x."""
    return held if not x.requires_grad else x + (held - x.detach())
