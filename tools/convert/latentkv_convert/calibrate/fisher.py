"""Palu's importance of a projection: the root-mean-square gradient of its weights over sequences, averaged
per KV head.

The loss is the mean next-token negative log-likelihood of a sequence with its own next tokens as labels, in
float32. Layer by layer: hidden states are stored going up, gradients of them flow down through one recomputed
layer at a time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..ir import SIDES, Array
from ..recipe import Recipe
from .stream import LayerStream

VERSION = 2
_IN_MEMORY = 4 << 30  # bytes of stored hidden states beyond which they live in an unnamed temporary file


def sample(recipe: Recipe) -> tuple[int, int]:
    return recipe.fisher_tokens, min(recipe.calib_window, 1024)  # 1024: Palu's sequence length


def collect(stream: LayerStream) -> Iterator[tuple[int, dict[str, Array]]]:
    """Per layer: k, v [n_kv], the mean over a head's weights of sqrt(mean over sequences of (dL/dW)^2)."""
    n_layer = stream.spec.n_layer
    hidden = stream.embed()
    inputs = stack(n_layer, hidden)
    with stream.bar(passes=2) as bar:
        for index in range(n_layer):
            inputs[index] = hidden
            with torch.no_grad(), stream.layer(index) as live:
                for window in range(stream.n_windows):
                    hidden[window] = stream.run(live, index, hidden[window : window + 1])[0].cpu()
                    bar.update(1)
        gradient = torch.empty_like(hidden)
        for window in range(stream.n_windows):
            top = hidden[window : window + 1].to(stream.device).requires_grad_()
            (slope,) = torch.autograd.grad(stream.loss(window, top), top)
            gradient[window] = slope[0].cpu()
        for index in reversed(range(n_layer)):
            yield index, _backward(stream, index, inputs[index], gradient, bar)


def _backward(
    stream: LayerStream, index: int, inputs: Tensor, gradient: Tensor, bar: Any
) -> dict[str, Array]:
    """Accumulates squared weight gradients of one layer and replaces `gradient` by that of its input."""
    with stream.layer(index) as live:
        modules: dict[str, Any] = {side: live.get_submodule(f"attn_{side}") for side in SIDES}
        weights = [module.weight.requires_grad_() for module in modules.values()]
        squares = [torch.zeros_like(weight, dtype=torch.float64) for weight in weights]
        for window in range(stream.n_windows):
            bottom = inputs[window : window + 1].to(stream.device).requires_grad_()
            output = stream.run(live, index, bottom)
            slopes = torch.autograd.grad(
                output, [bottom, *weights], gradient[window : window + 1].to(stream.device)
            )
            gradient[window] = slopes[0][0].cpu()
            for total, slope in zip(squares, slopes[1:], strict=True):
                total += slope.double() ** 2
            bar.update(1)
        result: dict[str, Array] = {}
        for side, total in zip(modules, squares, strict=True):
            per_row = (total / stream.n_windows).sqrt().mean(1).cpu().numpy()
            result[side] = per_row.reshape(stream.spec.n_kv, -1).mean(1)
        return result


def stack(n_layer: int, hidden: Tensor) -> Tensor:
    """Room for the input of every layer, [n_layer, windows, window, d]."""
    shape = (n_layer, *hidden.shape)
    if n_layer * hidden.nbytes <= _IN_MEMORY:
        return torch.empty(shape)
    with tempfile.TemporaryFile() as file:  # stays mapped after the file is closed
        return torch.from_numpy(np.memmap(file, dtype=np.float32, mode="w+", shape=shape))
