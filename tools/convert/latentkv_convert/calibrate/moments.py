"""Second moments of the K and V projections' outputs before bias (after a norm over all heads): M = (1/T) Σ
xᵀx, [w, w] float64, BOS included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..errors import warn
from ..ir import SIDES, Array
from ..recipe import Recipe
from .stream import LayerStream

VERSION = 2


def sample(recipe: Recipe) -> tuple[int, int]:
    return recipe.calib_tokens, recipe.calib_window


def collect(stream: LayerStream) -> Iterator[tuple[int, dict[str, Array]]]:
    """Per layer: k, v [w, w] second moments and k_mean, v_mean [w], all without the projection's bias."""
    if stream.tokens.numel() < 4 * stream.spec.kv_width:
        expected = f"at least {4 * stream.spec.kv_width} tokens for {stream.spec.kv_width} outputs"
        warn("--calib", expected, f"{stream.tokens.numel()}", "the tail of the spectrum is noise")
    with torch.no_grad(), stream.bar() as bar:
        for index, hidden, output in stream.forward():
            with stream.layer(index) as live:
                meters = {side: Meter(stream, live, side) for side in SIDES}
                for window in range(stream.n_windows):
                    output[window] = stream.run(live, index, hidden[window : window + 1])[0]
                    bar.update(1)
            yield index, {name: array for side in SIDES for name, array in meters[side].result().items()}


class Meter:
    """A hook that adds up x and xᵀx of one projection."""

    def __init__(self, stream: LayerStream, live: torch.nn.Module, side: str) -> None:
        module: Any = live.get_submodule(f"attn_{side}")
        self.side, self.bias = side, module.bias
        width = stream.spec.kv_width
        self.count = 0
        self.total = torch.zeros(width, dtype=torch.float64, device=stream.device)
        self.squares = torch.zeros(width, width, dtype=torch.float64, device=stream.device)
        module.register_forward_hook(self.add)

    def add(self, module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        rows = output if self.bias is None else output - self.bias
        flat = rows.reshape(-1, rows.shape[-1]).double()
        self.count += flat.shape[0]
        self.total += flat.sum(0)
        self.squares.addmm_(flat.T, flat)

    def result(self) -> dict[str, Array]:
        return {
            self.side: (self.squares / self.count).cpu().numpy(),
            f"{self.side}_mean": (self.total / self.count).cpu().numpy(),
        }
