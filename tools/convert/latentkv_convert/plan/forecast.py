"""What a plan costs in nats per token, measured on calibration windows that nothing was fitted to.

Fisher's prediction is of second order and takes errors as independent: right for comparing formats, too low
as a forecast. So the plan is run as the cache would run it: every layer in turn, later tokens reading
compressed copies of earlier ones (two_copies.py), against the uncompressed model. As `latentkv perplexity
--decode` measures it: over the second half of every window, with tokens leaving the recent window in the
cache's batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from latentkv.console.progress import stage

from ..calibrate.sample import Sample
from ..compute import floats
from ..course import CHECK, CHOOSE, ROUGHLY
from ..errors import warn
from ..fuse import center
from ..fuse.rotation import finished
from ..ir import FULL, OF_VALUE, SIDES, Forecast, LayerPlan, Plan, SidePlan
from ..rows import sizes
from ..work import Work

if TYPE_CHECKING:
    from torch import Tensor

    from ..calibrate.decoder import Layer
    from ..calibrate.positions import LayerPositions

CHECKED = 6  # windows that a plan is run on: they differ, and one or two of them are a rough forecast
# How many of the windows that a plan is checked on say what exact tokens cost. Rounding alone costs much the
# same everywhere: all rows of SmolLM2-135M in q8_0 2.3e-4 nats, with a standard error of 2 % over four
# windows.
PRICED = 1


def held_back(sample: Sample, n: int = CHECKED) -> NDArray[np.int64]:
    """[up to n, window] that no statistic has seen: the sample's own, and spare ones of the text."""
    from ..calibrate import copies

    own = sample.tokens[copies.split(len(sample.tokens))[1]]
    return np.concatenate([own, sample.spare[: max(0, n - len(own))]])[:n]


class Check:
    """Runs plans on windows that no statistic has seen. The uncompressed model is run once on each, and the
    plan that was asked for last not again."""

    def __init__(self, work: Work, n_windows: int = CHECKED) -> None:
        assert work.sample is not None
        self.work, self.held = work, held_back(work.sample, n_windows)
        self._any = self.held if len(self.held) else work.sample.tokens
        self._exact: dict[bytes, Tensor] = {}  # by window: last outputs [scored tokens, d], uncompressed
        self._plan: Plan | None = None  # that was run last
        self._nats: dict[bytes, float] = {}  # of that plan, by window: a token's

    def measured(self, plan: Plan, predicted: float) -> Forecast:
        """Mean divergence KL(uncompressed ‖ plan) over the windows, with its standard error."""
        if not len(self.held):
            expected = "two windows or more, one to check the plan on"
            warn("--fisher-tokens", expected, "one", "the forecast is the prediction")
            return Forecast(predicted, predicted, float("nan"), 0)
        per_window = self.divergences(plan, self.held)
        n = len(per_window)
        error = float(np.std(per_window, ddof=1) / np.sqrt(n)) if n > 1 else float("nan")
        return Forecast(float(np.mean(per_window)), predicted, error, n)

    def roughly(self, plan: Plan) -> float:
        """The mean over the first ROUGHLY windows, in nats per token. `measured` goes on from there."""
        return float(np.mean(self.divergences(plan, self._any[:ROUGHLY])))

    def price(self, paths: Mapping[str, str], regions: Plan) -> float:
        """Nats per token that exact tokens cost in the row formats of `regions`, where nothing else is done
        to those that have left the window. paths: of K and V."""
        k, v = (SidePlan(paths[side]) for side in SIDES)
        spec, full = self.work.spec, LayerPlan(FULL, FULL)
        layers = (LayerPlan(k, v) if spec.attends(layer) else full for layer in range(spec.n_layer))
        plan = replace(regions, layers=tuple(layers))
        return float(np.mean(self.divergences(plan, self._any[:PRICED], CHOOSE)))

    def divergences(self, plan: Plan, windows: NDArray[np.int64], label: str = CHECK) -> list[float]:
        """Mean KL divergence in nats per token of each window, over its second half. label: the stage that
        this is a part of."""
        plan = replace(plan, forecast=None)
        if self._plan != plan:
            self._plan, self._nats = plan, {}
        names = [window.tobytes() for window in windows]
        left = [row for row, name in enumerate(names) if name not in self._nats]
        if left:
            found = self._run(plan, windows[left], label)
            self._nats |= {names[row]: nats for row, nats in zip(left, found, strict=True)}
        return [self._nats[name] for name in names]

    def _run(self, plan: Plan, windows: NDArray[np.int64], label: str) -> list[float]:
        import torch

        from ..calibrate import head
        from ..calibrate.stream import LayerStream
        from ..calibrate.two_copies import TwoCopies
        from ..compute.arithmetic import model_arithmetic

        work, spec, known = self.work, self.work.spec, self._exact
        stream = LayerStream(work.source, windows, work.device, "check")
        names = [window.tobytes() for window in windows]
        new = [row for row, name in enumerate(names) if name not in known]
        cached = stream.embed().to(stream.device)
        exact = cached[new]
        scored = slice(cached.shape[1] // 2, -1)
        batch = sizes.demotion_batch() if plan.recent else 1
        with (
            model_arithmetic(work.device),
            torch.no_grad(),
            stage(spec.n_layer * (len(windows) + len(new)), label, "window") as bar,
        ):
            for index in range(spec.n_layer):
                copies = Copies(work, plan, index) if spec.attends(index) else None
                with stream.layer(index, index + 1) as live:

                    def step(
                        task: int, index: int = index, live: Layer = live, copies: Copies | None = copies
                    ) -> None:
                        if task >= len(windows):
                            row = task - len(windows)
                            exact[row] = stream.run(live, index, exact[row : row + 1])[0]
                            return
                        below = cached[task : task + 1]
                        if copies is None:
                            cached[task] = stream.run(live, index, below)[0]
                            return
                        read, old = copies(live, below, stream.positions.of(index))
                        with TwoCopies(spec.at(index).n_kv, plan.sink, plan.recent, old, batch, read):
                            cached[task] = stream.run(live, index, below)[0]

                    for _ in stream.each(step, len(windows) + len(new)):
                        bar.update(1)
            known |= {names[row]: exact[at, scored].clone() for at, row in enumerate(new)}

            def nats(row: int) -> float:
                return head.divergence(stream, known[names[row]], cached[row, scored])

            return list(stream.each(nats, len(names)))


Rows = tuple["Tensor", "Tensor"]  # k (after RoPE) and v [1, n_kv, T, head_dim]


class Copies:
    """K and V of one layer's input as readers of the cache get them back: of exact tokens, and of those that
    have left the exact window. These come from the former: a row is full when it leaves."""

    def __init__(self, work: Work, plan: Plan, index: int) -> None:
        layer = plan.layers[index]
        self.n_kv, self.mla = work.spec.at(index).n_kv, work.spec.mla
        self.exact = plan.recent_format
        self.replaced = {side: Replaced(work, layer.side(side), index, side) for side in SIDES}
        self.leaves = plan.recent > 0  # tokens the window
        self.rotated = layer.k.path == "rotated"
        self.of_value = layer.k == OF_VALUE

    def __call__(self, live: Layer, hidden: Tensor, positions: LayerPositions) -> tuple[Rows | None, Rows]:
        """hidden [1, T, d]. No exact rows: they are what the model makes."""
        x = live.attention_input(hidden)
        if self.mla is not None:
            return self._of_one_row(live, x, positions)
        values = self._projected(live.attn_v, x, "v", lambda rows: live.heads("v", rows))
        with_rope = positions.with_rope
        if self.of_value:
            keys = [with_rope(live.attn_k_norm(rows)) for rows in values]
        elif self.rotated:
            key = with_rope(live.heads("k", live.attn_k(x)))[0].transpose(0, 1)  # [T, n_kv, head_dim]
            both = self._both(key.flatten(1), "k")
            keys = [rows.reshape(key.shape).transpose(0, 1)[None] for rows in both]
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
        return [heads((rows + bias)[None]) for rows in self._both(module(x)[0] - bias, side)]

    def _both(self, rows: Tensor, side: str) -> tuple[Tensor, Tensor]:
        """[n, w] as exact tokens are stored, a segment for every head, and as they are when they left."""
        from ..rows import quantizer

        replaced, exact = self.replaced[side], rows
        if self.exact != "f16":
            heads = replaced.about_mean(rows).unflatten(1, (self.n_kv, -1))
            exact = replaced.with_mean(quantizer.stored(heads, self.exact).flatten(1))
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

        from ..rows import quantizer

        if self.plan.formats is None:
            return x
        x = self.about_mean(x)
        parts = x.split([len(down) for down, _ in self.factors], dim=1)
        latent = torch.cat(
            [(part.double() @ down).float() for part, (down, _) in zip(parts, self.factors, strict=True)], 1
        )
        groups = zip(self.plan.segments, self.plan.formats, strict=True)
        stored = quantizer.stored_rows(latent, [tuple(zip(*group, strict=True)) for group in groups])
        kept = stored.split([len(up) for _, up in self.factors], dim=1)
        back = [(part.double() @ up).float() for part, (_, up) in zip(kept, self.factors, strict=True)]
        return self.with_mean(torch.cat(back, dim=1))

    def about_mean(self, x: Tensor) -> Tensor:
        return x if self.mean is None else x - self.mean

    def with_mean(self, x: Tensor) -> Tensor:
        return x if self.mean is None else x + self.mean
