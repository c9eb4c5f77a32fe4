"""What a plan costs in nats per token, measured on calibration windows that nothing was fitted to.

Fisher's prediction is of second order and takes errors as independent: right for comparing formats, too low
as a forecast. So the plan is run as the cache would run it: every layer in turn, later tokens reading
compressed copies of earlier ones (two_copies.py), against the uncompressed model. As `latentkv perplexity
--decode` measures it: over the second half of every window, with tokens leaving the recent window in the
cache's batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .. import progress
from ..calibrate.sample import Sample
from ..errors import warn
from ..ir import F32, SIDES, Basis, Forecast, LayerPlan, Plan, SidePlan
from ..rows import quantizer, sizes
from ..write.fuse import center
from ..write.fuse.finish import finished
from .work import Work

if TYPE_CHECKING:
    from torch import Tensor

    from ..calibrate.stream import LayerStream

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

    from ..calibrate.stream import LayerStream
    from ..calibrate.two_copies import TwoCopies

    spec = work.spec
    stream = LayerStream(work.source, windows, work.device, "check plan")
    exact = stream.embed()
    cached = exact.clone()
    batch = sizes.DEMOTION_BATCH if plan.recent else 1
    first = exact.shape[1] // 2
    with torch.no_grad(), progress.bar(spec.n_layer * len(windows), "check plan", "window") as bar:
        for index, layer in enumerate(plan.layers):
            body = Copies(work, layer, index, stream)
            with stream.layer(index) as live:
                for row in range(len(windows)):
                    exact[row] = stream.run(live, index, exact[row : row + 1])[0].cpu()
                    copy = body(cached[row : row + 1])
                    with TwoCopies(spec.n_kv, plan.sink, plan.recent, copy, batch):
                        cached[row] = stream.run(live, index, cached[row : row + 1])[0].cpu()
                    bar.update(1)
        result = []
        for row in range(len(windows)):
            p, q = (
                stream.logits(each[row : row + 1].to(stream.device))[first:-1].log_softmax(-1)
                for each in (exact, cached)
            )
            result.append(float((p.exp() * (p - q)).sum(-1).double().mean()))
    return result


class Copies:
    """K (after RoPE) and V of a layer's input as a reader of the cache gets them back."""

    def __init__(self, work: Work, layer: LayerPlan, index: int, stream: LayerStream) -> None:
        from ..calibrate.copies import Tap

        self.stream, self.index, self.n_kv = stream, index, work.spec.n_kv
        self.replaced = {side: Replaced(work, layer.side(side), index, side) for side in SIDES}
        self.rotated = layer.k.path == "rotated"
        with stream.layer(index) as self.live:
            for side in SIDES if not self.rotated else ("v",):
                Substitute(Tap(stream, self.live, side), self.replaced[side], self.live, f"attn_{side}")

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [1, T, d] -> k, v [1, n_kv, T, head_dim]"""
        from ..calibrate.two_copies import TwoCopies

        with TwoCopies(self.n_kv, 0, hidden.shape[1]) as seen:
            self.stream.run(self.live, self.index, hidden)
        key, value = seen.found()
        return _rotated(key, self.replaced["k"], self.n_kv) if self.rotated else key, value


class Replaced:
    """Rows of one layer's K or V as a reader of the cache gets them back."""

    def __init__(self, work: Work, plan: SidePlan, layer: int, side: str) -> None:
        self.plan = plan
        self.factors: tuple[Basis, ...] = finished(work, plan, layer, side)
        self.mean = center.mean(work, layer, side) if center.centred(work, layer, side, plan.path) else None

    def __call__(self, x: F32) -> F32:
        """[n, w] -> [n, w]: the projection's output without bias, or a rotated k."""
        assert self.plan.formats is not None
        mean = np.float32(0) if self.mean is None else self.mean.astype(np.float32)
        x = x - mean
        result = np.empty_like(x)
        width = x.shape[1] // len(self.factors)
        for group, basis in enumerate(self.factors):
            block = slice(group * width, (group + 1) * width)
            latent = (x[:, block] @ basis.down).astype(np.float32)
            begin = 0
            for n, fmt in zip(self.plan.segments[group], self.plan.formats[group], strict=True):
                latent[:, begin : begin + n] = quantizer.stored(latent[:, begin : begin + n], fmt)
                begin += n
            result[:, block] = latent @ basis.up
        return result + mean


class Substitute:
    """Puts the cache's rows in the place of a projection's output."""

    def __init__(self, tap: Any, replaced: Replaced, live: Any, module: str) -> None:
        self.tap, self.replaced = tap, replaced
        live.get_submodule(module).register_forward_hook(self._replace)

    def _replace(self, module: Any, inputs: Any, output: Any) -> Any:
        import torch

        rows = torch.from_numpy(self.replaced(self.tap.values().cpu().numpy())).to(output)
        if self.tap.bias is not None:
            rows = rows + self.tap.bias
        return rows.reshape(output.shape)


def _rotated(key: Any, replaced: Replaced, n_kv: int) -> Any:
    """key [1, n_kv or n_head, T, head_dim] after RoPE -> [1, n_kv, T, head_dim] as read from the cache."""
    import torch

    heads = key[0, :: key.shape[1] // n_kv].transpose(0, 1)  # [T, n_kv, head_dim]
    rows = replaced(heads.flatten(1).cpu().numpy())
    return torch.from_numpy(rows).to(key).reshape(heads.shape).transpose(0, 1)[None]
