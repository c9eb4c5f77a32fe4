"""What a plan costs in nats per token, measured on calibration windows that nothing was fitted to.

Fisher's prediction is of second order and takes errors as independent: right for comparing formats, too low
as a forecast. So the plan is run as the cache would run it: every layer in turn, later tokens reading
compressed copies of earlier ones (two_copies.py), against the uncompressed model. As `latentkv perplexity
--decode` measures it: over the second half of every window, with tokens leaving the recent window in the
cache's batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from latentkv.console.progress import stage

from ..calibrate.sample import Sample
from ..course import CHECK, CHOOSE, PRICED
from ..errors import warn
from ..ir import FULL, SIDES, Forecast, LayerPlan, Plan, SidePlan
from ..rows import sizes
from ..work import Work
from .read_back import Copies

if TYPE_CHECKING:
    from torch import Tensor

    from ..calibrate.decoder import Layer

CHECKED = 4  # windows that a plan is run on: they differ, and one or two of them are a rough forecast


def held_back(sample: Sample, n: int = CHECKED) -> NDArray[np.int64]:
    """[up to n, window] that no statistic has seen: spare ones, and where these are too few and no longer,
    those of the sample that it holds back."""
    from ..calibrate import copies

    if sample.spare.shape[1] > sample.tokens.shape[1]:
        return sample.spare[:n]
    own = sample.tokens[copies.split(len(sample.tokens))[1]]
    return np.concatenate([sample.spare, own])[:n]


def warn_of_one_window(sample: Sample) -> None:
    """One line, where a text is so short that nothing of it is left to check a plan on."""
    if not len(held_back(sample)):
        size = sample.tokens.shape[1]
        hint = "choose a longer text, more --fisher-tokens or a smaller --calib-window"
        warn("--calib", f"two windows of {size} tokens or more, one to check the plan on", "one", hint)


def fitted(sample: Sample) -> NDArray[np.int64]:
    """[n, window] that statistics have seen."""
    from ..calibrate import copies

    return sample.tokens[copies.split(len(sample.tokens))[0]]


def run(sample: Sample) -> NDArray[np.int64]:
    """[n, window] that a plan is run on to correct it: deep ones, or those of the statistics."""
    return sample.deep if len(sample.deep) else fitted(sample)


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
        """Mean divergence KL(uncompressed ‖ plan) over the windows, with its standard error; the prediction
        where there is no window."""
        if not len(self.held):
            return Forecast(predicted, predicted, float("nan"), 0)
        per_window = self.divergences(plan, self.held)
        n = len(per_window)
        error = float(np.std(per_window, ddof=1) / np.sqrt(n)) if n > 1 else float("nan")
        return Forecast(float(np.mean(per_window)), predicted, error, n)

    def roughly(self, plan: Plan) -> float:
        """The mean over the first windows, in nats per token. `measured` goes on from there."""
        return float(np.mean(self.divergences(plan, self._any[:PRICED])))

    def price(self, paths: Mapping[str, str], regions: Plan) -> float:
        """Nats per token that exact tokens cost in the row formats of `regions`, where nothing else is done
        to those that have left the window. paths: of K and V."""
        k, v = (SidePlan(paths[side]) for side in SIDES)
        spec, full = self.work.spec, LayerPlan(FULL, FULL)
        layers = (LayerPlan(k, v) if spec.makes_rows(layer) else full for layer in range(spec.n_layer))
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

        work, known = self.work, self._exact
        names = [window.tobytes() for window in windows]
        new = [row for row, name in enumerate(names) if name not in known]
        own = work.trail.name("run", plan, windows, new, bool(work.polished))
        found = work.trail.found(own)
        n_steps = work.spec.n_layer * (len(windows) + len(new)) + len(names)
        if found is None:
            exact, nats = self._passed(own, plan, windows, new, label, n_steps)
            work.trail.keep(own, {"exact": exact.cpu().numpy(), "nats": np.array(nats)})
        else:
            exact = torch.from_numpy(np.array(found["exact"])).to(work.device)
            nats = [float(x) for x in found["nats"]]
            with stage(0, label, "window", n_steps):
                pass
        known |= {names[row]: exact[at] for at, row in enumerate(new)}
        return nats

    def _passed(
        self, own: str, plan: Plan, windows: NDArray[np.int64], new: list[int], label: str, n_steps: int
    ) -> tuple[Tensor, list[float]]:
        """What the uncompressed model makes of the scored tokens of the `new` windows, and the divergence of
        all. own: this pass in the trail."""
        import torch

        from ..calibrate import head
        from ..calibrate.stream import LayerStream
        from ..calibrate.two_copies import TwoCopies
        from ..compute.arithmetic import model_arithmetic

        work, spec, n = self.work, self.work.spec, len(windows)
        work.kept.make_room(work.source, torch.device(work.device), repeats=False)
        stream = LayerStream(work.source, windows, work.device, "check", kept=work.kept)
        journal = work.trail.journal(own, spec.n_layer, layers=stream.device.type == "cpu")
        first = max(journal.states.numbers("r"), default=0)
        if first:
            both = journal.states.take(f"r{first}")
        else:
            embedded = stream.embed().to(stream.device)
            both = torch.cat([embedded, embedded[new]])
            journal.make_room(both, 2)
        cached, exact = both[:n], both[n:]
        scored = slice(cached.shape[1] // 2, -1)
        batch = sizes.demotion_batch() if plan.recent else 1
        n_left = (spec.n_layer - first) * len(both) + n
        with (
            model_arithmetic(work.device),
            torch.no_grad(),
            stage(n_left, label, "window", n_steps) as bar,
        ):
            for index in range(first, spec.n_layer):
                copies = Copies(work, plan, index) if spec.attends(index) else None
                with stream.layer(index, index + 1) as live:

                    def step(
                        task: int, index: int = index, live: Layer = live, copies: Copies | None = copies
                    ) -> None:
                        if task >= n:
                            row = task - n
                            exact[row] = stream.run(live, index, exact[row : row + 1])[0]
                            return
                        below = cached[task : task + 1]
                        if copies is None:
                            cached[task] = stream.run(live, index, below)[0]
                            return
                        read, old = copies(live, below, stream.positions.of(index))
                        with TwoCopies(spec.at(index).n_kv, plan.sink, plan.recent, old, batch, read):
                            cached[task] = stream.run(live, index, below)[0]

                    for _ in stream.each(step, len(both)):
                        bar.update(1)
                if journal.folder is not None:
                    journal.keep(f"r{index + 1}", both.clone())
                    journal.states.drop(f"r{index}")
            exact = exact[:, scored].clone()
            known = self._exact | {windows[row].tobytes(): exact[at] for at, row in enumerate(new)}

            def nats(row: int) -> float:
                return head.divergence(stream, known[windows[row].tobytes()], cached[row, scored])

            found = []
            for divergence in stream.each(nats, n):
                found.append(divergence)
                bar.update(1)
            return exact, found
