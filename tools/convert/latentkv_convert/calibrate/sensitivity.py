"""How much a block's output suffers from an error in its K or V: squared error of the output per token,
relative to the output, over the lost share of K's (V's) squared energy.

The error is the projection's own output at other tokens of the window with random signs, which has exactly
the second moment of the output, at a tenth of its size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..ir import SIDES, Array
from ..recipe import Recipe
from .decoder import Layer, Watch
from .stream import NOTHING, LayerStream

VERSION = 2
_SIZE = 0.1  # of the output: small enough that the softmax responds linearly, far above f32 rounding


def sample(recipe: Recipe) -> tuple[int, int]:
    return min(recipe.calib_tokens, 8192), min(recipe.calib_window, 1024)


def collect(stream: LayerStream) -> Iterator[tuple[int, Mapping[str, Array]]]:
    """Per layer that attends: k, v [1]."""
    with torch.no_grad(), stream.bar(passes=3) as bar:
        for index, hidden, output in stream.forward():
            if not stream.spec.attends(index):
                with stream.layer(index) as live:
                    stream.advance(live, index, hidden, output, bar)
                bar.update(2 * stream.n_windows)
                yield index, NOTHING
                continue
            total = dict.fromkeys(SIDES, 0.0)
            with stream.layer(index) as live:
                step = partial(_errors, stream, live, index, hidden, output)
                for found in stream.each(step, stream.n_windows):
                    total = {side: total[side] + found[side] for side in SIDES}
                    bar.update(3)
            scale = stream.n_windows * _SIZE**2
            yield index, {side: np.array([total[side] / scale]) for side in SIDES}


def _errors(
    stream: LayerStream, live: Layer, index: int, hidden: Tensor, output: Tensor, window: int
) -> dict[str, float]:
    """Squared relative errors of one window's output, which is written."""
    before, after = hidden[window : window + 1], output[window : window + 1]
    after.copy_(stream.run(live, index, before))
    found = {}
    for side in SIDES:
        changed = stream.run(live, index, before, disturbed(live, side, window))
        found[side] = relative(changed, after, per_token=True) ** 2
    return found


def relative(out: Tensor, exact: Tensor, *, per_token: bool) -> float:
    """||out - exact|| / ||exact|| over everything, or the root of the mean over tokens of its square.

    A few tokens of enormous norm (the first of a window, mostly) hide all others in the first form.
    """
    wrong, whole = (out - exact).double().square().sum(-1), exact.double().square().sum(-1)
    share = (wrong / whole).mean() if per_token else wrong.sum() / whole.sum()
    return float(share.sqrt())


def disturbed(live: Layer, side: str, seed: int) -> Watch:
    """Adds noise to one projection's output."""
    generator = torch.Generator().manual_seed(seed)
    bias = getattr(live, f"attn_{side}").bias

    def add(name: str, output: Tensor) -> Tensor:
        if name != side:
            return output
        rows = output if bias is None else output - bias
        n = rows.shape[1]
        signs = (torch.randint(0, 2, (1, n, 1), generator=generator) * 2 - 1).to(rows.device)
        return output + _SIZE * signs * rows[:, torch.randperm(n, generator=generator).to(rows.device)]

    return add
