"""Importance of weights' columns: mean squares of the inputs of every linear map, as in llama.cpp's imatrix.

A quantizer that minimises Σ_c E[x_c²] (w_c - ŵ_c)² over a block of a row minimises the error of the row's
product, were channels independent. Whichever pass reads the text first measures them on the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..compute import crew
from ..ir import READS, Array
from ..recipe import Recipe
from .experts import Stacked
from .stream import LayerStream

VERSION = 1


def sample(recipe: Recipe) -> tuple[int, int]:
    """Where no other statistic is needed."""
    return recipe.calib_tokens, recipe.calib_window


class Activations:
    """Hooks on the layers of one pass, each for the first time that it is run."""

    def __init__(self, known: Mapping[int, Mapping[str, Array]] | None = None) -> None:
        """known: of layers that an earlier run has measured."""
        self._known = dict(known or {})
        self._meters: dict[int, dict[str, _Meter]] = {}

    def __len__(self) -> int:
        return len(self._known | self._meters)

    def watch(self, index: int, live: nn.Module) -> None:
        if index in self._meters or index in self._known:
            return
        read = {name: each for name, each in live.named_children() if isinstance(each, (nn.Linear, Stacked))}
        own = {name: module for name, module in read.items() if READS.get(name) not in read}
        self._meters[index] = {name: _Meter(module) for name, module in own.items()}

    def layer(self, index: int) -> Mapping[str, Array]:
        """attn_q, attn_output, ffn_up, ffn_down: [inputs] float64; of experts together, by who read more."""
        if index in self._known:
            return self._known[index]
        return {name: meter.result() for name, meter in self._meters[index].items()}


class _Meter:
    """Adds up the windows apart, so that the order in which threads come to them changes nothing."""

    def __init__(self, module: nn.Linear | Stacked) -> None:
        self._of_windows: dict[int, tuple[int, Tensor]] = {}
        self._zero = torch.zeros(module.weight.shape[-1], dtype=torch.float64, device=module.weight.device)
        module.register_forward_pre_hook(self.add)

    def add(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        rows: Tensor = inputs[0].detach().flatten(0, -2)
        window = crew.current()
        count, squares = self._of_windows.get(window, (0, self._zero))
        squares = squares + rows.square().sum(0, dtype=torch.float64)
        self._of_windows[window] = count + len(rows), squares

    def result(self) -> Array:
        windows = [self._of_windows[window] for window in sorted(self._of_windows)]
        squares = sum((squares for _, squares in windows), self._zero)
        return (squares / max(1, sum(count for count, _ in windows))).cpu().numpy()


def collect(stream: LayerStream) -> Iterator[tuple[int, Mapping[str, Array]]]:
    """A pass for them alone."""
    meter = Activations()
    stream.watchers.append(meter)
    with torch.no_grad(), stream.bar() as bar:
        for index, hidden, output in stream.forward():
            with stream.layer(index) as live:
                stream.advance(live, index, hidden, output, bar)
            yield index, meter.layer(index)
