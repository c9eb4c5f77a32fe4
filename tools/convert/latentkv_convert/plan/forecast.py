"""What a plan costs in nats per token, measured on calibration windows that nothing was fitted to.

Fisher's prediction is of second order and takes errors as independent: right for comparing formats, too low
as a forecast. So the plan is run as the cache would run it: every layer in turn, later tokens reading
compressed copies of earlier ones (two_copies.py), against the uncompressed model. As `latentkv perplexity
--decode` measures it: over the second half of every window, with tokens leaving the recent window in the
cache's batches.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from latentkv.console.progress import stage

from .. import floats
from ..calibrate.sample import Sample
from ..errors import warn
from ..ir import SIDES, Forecast, LayerPlan, Plan, SidePlan
from ..rows import sizes
from ..write.fuse import center
from ..write.fuse.finish import finished
from .work import Work

if TYPE_CHECKING:
    from torch import Tensor

    from ..calibrate.decoder import Layer
    from ..calibrate.positions import LayerPositions

CHECKED = 8  # windows: they differ, and one or two of them are no forecast


def measured(work: Work, plan: Plan, predicted: float) -> Forecast:
    """Mean divergence KL(uncompressed ‖ plan) over the held-back windows, with its standard error."""
    assert work.sample is not None
    held = held_back(work.sample)
    if not len(held):
        warn(
            "--fisher-tokens",
            "two windows or more, one to check the plan on",
            "one",
            "the forecast is the prediction",
        )
        return Forecast(predicted, predicted, float("nan"), 0)
    per_window = divergences(work, plan, held)
    error = float(np.std(per_window, ddof=1) / np.sqrt(len(held))) if len(held) > 1 else float("nan")
    return Forecast(float(np.mean(per_window)), predicted, error, len(held))


def held_back(sample: Sample) -> NDArray[np.int64]:
    """[n, window] that no statistic has seen: the sample's own and, up to CHECKED, spare ones of the text."""
    from ..calibrate import copies

    own = sample.tokens[copies.split(len(sample.tokens))[1]]
    return np.concatenate([own, sample.spare[: max(0, CHECKED - len(own))]])


def divergences(work: Work, plan: Plan, windows: NDArray[np.int64]) -> list[float]:
    """Mean KL divergence in nats per token of each window, over its second half."""
    import torch

    from ..calibrate import head
    from ..calibrate.arithmetic import model_arithmetic
    from ..calibrate.stream import LayerStream
    from ..calibrate.two_copies import TwoCopies

    spec = work.spec
    label = "check plan"
    stream = LayerStream(work.source, windows, work.device, label)
    exact = stream.embed().to(stream.device)
    cached = exact.clone()
    first = exact.shape[1] // 2
    with (
        model_arithmetic(),
        torch.no_grad(),
        stage(spec.n_layer * len(windows), label, "window") as bar,
    ):
        for index, layer in enumerate(plan.layers):
            body = Copies(work, layer, index)
            sink, recent = plan.exact_tokens(index)
            batch = sizes.DEMOTION_BATCH if recent else 1
            with stream.layer(index, index + 1) as live:
                for row in range(len(windows)):
                    exact[row] = stream.run(live, index, exact[row : row + 1])[0]
                    below = cached[row : row + 1]
                    copy = body(live, below, stream.positions.of(index))
                    with TwoCopies(spec.n_kv, sink, recent, copy, batch):
                        cached[row] = stream.run(live, index, below)[0]
                    bar.update(1)
        scored = slice(first, -1)
        return [
            head.divergence(stream, exact[row, scored], cached[row, scored]) for row in range(len(windows))
        ]


class Copies:
    """K (after RoPE) and V of one layer's input as a reader of the cache gets them back."""

    def __init__(self, work: Work, layer: LayerPlan, index: int) -> None:
        self.replaced = {side: Replaced(work, layer.side(side), index, side) for side in SIDES}
        self.rotated = layer.k.path == "rotated"

    def __call__(self, live: Layer, hidden: Tensor, positions: LayerPositions) -> tuple[Tensor, Tensor]:
        """hidden [1, T, d] -> k, v [1, n_kv, T, head_dim]"""
        x = live.attention_input(hidden)
        value = live.heads("v", self._projected(live.attn_v, x, "v"))
        if not self.rotated:
            return positions.turned(live.heads("k", self._projected(live.attn_k, x, "k"))), value
        key = positions.turned(live.heads("k", live.attn_k(x)))[0].transpose(0, 1)  # [T, n_kv, head_dim]
        rows = self.replaced["k"](key.flatten(1))
        return rows.reshape(key.shape).transpose(0, 1)[None], value

    def _projected(self, module: Any, x: Tensor, side: str) -> Tensor:
        """The projection's output [1, T, w]; what is cached is without its bias."""
        rows = module(x)[0]
        if module.bias is None:
            return self.replaced[side](rows)[None]
        return (self.replaced[side](rows - module.bias) + module.bias)[None]


class Replaced:
    """Rows of one layer's K or V as a reader of the cache gets them back."""

    def __init__(self, work: Work, plan: SidePlan, layer: int, side: str) -> None:
        moved = partial(floats.tensor, device=work.device)
        self.plan = plan
        self.factors = [(moved(b.down), moved(b.up)) for b in finished(work, plan, layer, side)]
        centred = center.centred(work, layer, side, plan.path)
        mean = center.mean(work, layer, side) if centred else None
        self.mean = None if mean is None else moved(mean.astype(np.float32))

    def __call__(self, x: Tensor) -> Tensor:
        """[n, w] -> [n, w]: the projection's output without bias, or a rotated k."""
        import torch

        from ..rows import quantizer

        assert self.plan.formats is not None
        x = x if self.mean is None else x - self.mean
        blocks = []
        for group, (down, up) in enumerate(self.factors):
            width = len(down)
            latent = (x[:, group * width : (group + 1) * width].double() @ down).float()
            pieces = latent.split(self.plan.segments[group], dim=1)
            kept = [quantizer.stored(*each) for each in zip(pieces, self.plan.formats[group], strict=True)]
            blocks.append((torch.cat(kept, dim=1).double() @ up).float())
        result = torch.cat(blocks, dim=1)
        return result if self.mean is None else result + self.mean
