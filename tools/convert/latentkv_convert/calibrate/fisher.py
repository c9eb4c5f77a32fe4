"""Palu's importance of a projection: the root-mean-square gradient of its weights over sequences, averaged
per KV head.

The loss is the mean next-token negative log-likelihood of a sequence with its own next tokens as labels, in
float32. Layer by layer: hidden states are stored going up, gradients of them flow down through one recomputed
layer at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ir import SIDES, Array
from ..recipe import Recipe
from . import head
from .stream import NOTHING, LayerStream

VERSION = 2


def sample(recipe: Recipe) -> tuple[int, int]:
    return recipe.fisher_tokens, min(recipe.calib_window, 1024)  # 1024: Palu's sequence length


def collect(stream: LayerStream) -> Iterator[tuple[int, Mapping[str, Array]]]:
    """Per layer that attends: k, v [n_kv], the mean over a head's weights of sqrt(mean over sequences of
    (dL/dW)^2)."""

    def slope(window: int, hidden: Tensor) -> Tensor:
        return text_slope(stream, window, hidden)

    with stream.bar() as bar:
        for index, hidden, output in stream.forward(keep=True):
            with torch.no_grad(), stream.layer(index) as live:
                stream.advance(live, index, hidden, output, bar)
    with stream.bar_back() as bar:
        for index, inputs, above, below in stream.backward(slope, bar):
            if stream.spec.attends(index):
                yield index, _backward(stream, index, inputs, above, below, bar)
                continue
            with stream.layer(index) as live:
                stream.descend(live, index, inputs, above, below, bar)
            yield index, NOTHING


def text_slope(stream: LayerStream, window: int, hidden: Tensor) -> Tensor:
    """Gradient [window, d] of the text's mean negative log-likelihood by hidden [1, window, d]."""
    following = stream.tokens[window].to(stream.device)[1:]
    slopes = []
    for block in head.blocks(stream, len(following)):
        with torch.enable_grad():
            top = hidden[:, block].detach().requires_grad_()
            surprise = torch.nn.functional.cross_entropy(
                stream.logits(top), following[block], reduction="sum"
            )
            slopes.append(torch.autograd.grad(surprise, top)[0][0])
    slope = torch.cat(slopes)
    return torch.cat([slope, torch.zeros_like(slope[:1])]) / len(following)


def _backward(
    stream: LayerStream, index: int, inputs: Tensor, above: Tensor, below: Tensor, bar: Any
) -> dict[str, Array]:
    """Accumulates squared weight gradients of one layer; above, below: gradients of its output and input."""
    with stream.layer(index) as live:
        modules: dict[str, Any] = {side: live.get_submodule(f"attn_{side}") for side in SIDES}
        weights = [module.weight.requires_grad_() for module in modules.values()]
        squares = [torch.zeros_like(weight, dtype=torch.float64) for weight in weights]

        def step(window: int) -> Sequence[Tensor]:
            bottom = inputs[window : window + 1].clone().requires_grad_()
            output = stream.run(live, index, bottom)
            down, *slopes = torch.autograd.grad(output, [bottom, *weights], above[window : window + 1])
            below[window] = down[0]
            return slopes

        for slopes in stream.each(step, stream.n_windows):
            for total, slope in zip(squares, slopes, strict=True):
                total += slope.double() ** 2
            bar.update(1)
        result: dict[str, Array] = {}
        for side, total in zip(modules, squares, strict=True):
            per_row = (total / stream.n_windows).sqrt().mean(1).cpu().numpy()
            result[side] = per_row.reshape(stream.spec.at(index).n_kv, -1).mean(1)
        return result
