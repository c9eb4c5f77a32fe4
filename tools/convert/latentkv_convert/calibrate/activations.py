"""Importance of weights' columns: mean squares of the inputs of every linear map, as in llama.cpp's imatrix.

A quantizer that minimises Σ_c E[x_c²] (w_c - ŵ_c)² over a block of a row minimises the error of the row's
product, were channels independent. Whichever pass reads the text first measures them on the way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..ir import READS, Array
from ..recipe import Recipe
from .decoder import Stacked
from .stream import LayerStream

VERSION = 1


def sample(recipe: Recipe) -> tuple[int, int]:
    """Where no other statistic is needed."""
    return recipe.calib_tokens, recipe.calib_window


class Activations:
    """Hooks on the layers of one pass, each for the first time that it is run."""

    def __init__(self) -> None:
        self._meters: dict[int, dict[str, _Meter]] = {}

    def __len__(self) -> int:
        return len(self._meters)

    def watch(self, index: int, live: nn.Module) -> None:
        if index in self._meters:
            return
        read = {name: each for name, each in live.named_children() if isinstance(each, (nn.Linear, Stacked))}
        self._meters[index] = {name: _Meter(module) for name, module in read.items() if name not in READS}

    def layer(self, index: int) -> dict[str, Array]:
        """attn_q, attn_output, ffn_up, ffn_down: [inputs] float64; of experts together, by who read more."""
        return {name: meter.result() for name, meter in self._meters[index].items()}


class _Meter:
    def __init__(self, module: nn.Linear | Stacked) -> None:
        self.count = 0
        weight = module.weight
        self.squares = torch.zeros(weight.shape[-1], dtype=torch.float64, device=weight.device)
        module.register_forward_pre_hook(self.add)

    def add(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        x: Tensor = inputs[0].detach()
        rows = x.reshape(-1, x.shape[-1])
        self.count += rows.shape[0]
        self.squares += rows.square().sum(0, dtype=torch.float64)

    def result(self) -> Array:
        return (self.squares / max(1, self.count)).cpu().numpy()


def run(stream: LayerStream) -> None:
    """A pass for its watchers alone."""
    hidden = stream.embed()
    with torch.no_grad(), stream.bar() as bar:
        for index in range(stream.spec.n_layer):
            with stream.layer(index) as live:
                for window in range(stream.n_windows):
                    hidden[window] = stream.run(live, index, hidden[window : window + 1])[0].cpu()
                    bar.update(1)
