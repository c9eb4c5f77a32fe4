"""What the segments of a plan cost while the model runs.

Fisher moments are of the uncompressed model, and of gradients whose heavy tokens are limited; errors of one
token are not independent. So distortions are right among the formats of a segment, but not from one segment
to another. Here the plan is run, and with alpha the size of one segment's errors, 1 as they are, half of
d loss / d alpha is that segment's part of a loss that is quadratic in errors. Distortions are multiplied by
this part over what was predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from latentkv.console.progress import stage
from latentkv.console.stage import Stage
from latentkv.plan.allocation import Group

from ..compute.arithmetic import model_arithmetic
from ..course import CHECK
from ..fuse import energy
from ..ir import F64, SIDES, ModelSpec, Plan, SidePlan
from ..work import Work
from .allotment import DROP_PENALTY, Allotment
from .candidates import Candidate, Shape, places
from .compressed import Compressed
from .read_back import Replaced

CHUNK = 4  # windows at once: hidden states of all layers are in memory
ROUNDS = 2  # where they take seconds; one on a processor
# A factor of one segment beside that of all. Down to an eighth of it, Qwen2.5-Coder-1.5B's plan at 8.5 % of
# f16 lost 5.9 nats, not 0.04.
LEAST, MOST = 0.5, 8.0
PRIOR = 4.0  # mean segments of a side whose factor a segment's own is drawn to

Shares = Mapping[tuple[int, str], F64]  # by layer and side: nats per token of every segment


class ScaledErrors(Replaced):
    """Rows whose errors are alpha times as large, by segment. Numbers that are dropped are errors."""

    def __init__(self, work: Work, plan: SidePlan, layer: int, side: str) -> None:
        super().__init__(work, plan, layer, side)
        groups = zip(plan.segments, plan.formats or (), strict=True)
        pairs = [pair for group in groups for pair in zip(*group, strict=True)]
        device = self.factors[0][0].device
        self.factors = [(down.float(), up.float()) for down, up in self.factors]
        self.alpha = torch.ones(len(pairs), device=device, requires_grad=True)
        self._widths = torch.tensor([width for width, _ in pairs], device=device)
        self._dropped = torch.tensor([name == "none" for _, name in pairs], device=device)
        self._gains = torch.ones(sum(plan.ranks), device=device)
        if plan.regains:
            found = energy.gains(*zip(*pairs, strict=True))
            self._gains = torch.from_numpy(found).to(self._gains)

    @property
    def parameters(self) -> Sequence[Tensor]:
        return [self.alpha]

    def live(self) -> ScaledErrors:
        return self

    def noting(self, part: int) -> ScaledErrors:
        return self

    def read(self, latent: Tensor) -> Tensor:
        alpha = self.alpha.repeat_interleave(self._widths)
        exact = latent / self._gains  # what the factors make the row of
        error = self.held(latent.detach()) - exact.detach()
        dropped = self._dropped.repeat_interleave(self._widths)
        return torch.where(dropped, latent * (1 - alpha), exact + alpha * error)


def shares(work: Work, plan: Plan, windows: NDArray[np.int64]) -> Shares:
    """Of the loss on windows [n, window], at positions up to the served context."""
    rows = {}
    for index in work.spec.row_layers:
        for side in SIDES:
            chosen = plan.layers[index].side(side)
            if chosen.formats is not None and chosen.path not in ("full", "value"):
                rows[index, side] = ScaledErrors(work, chosen, index, side)
    rng = np.random.default_rng([work.seed, len(windows)])
    last = max(0, (plan.fitted_context or 0) - windows.shape[1])
    chunks = [windows[begin : begin + CHUNK] for begin in range(0, len(windows), CHUNK)]
    found = {key: np.zeros(len(own.alpha)) for key, own in rows.items()}
    with model_arithmetic(work.device), stage(2 * work.spec.n_layer * len(chunks), CHECK, "layer") as bar:
        for at, chunk in enumerate(chunks):
            share, begin = len(chunk) / len(windows), int(rng.integers(0, last + 1))
            for key, slope in _slopes(work, plan, rows, chunk, begin, share, bar).items():
                found[key] += 0.5 * slope
            bar.reach(2 * work.spec.n_layer * (at + 1))
    return found


def _slopes(
    work: Work,
    plan: Plan,
    rows: Mapping[tuple[int, str], ScaledErrors],
    chunk: NDArray[np.int64],
    begin: int,
    share: float,
    bar: Stage,
) -> Shares:
    """Gradients by the sizes of errors of `share` times the mean loss of some windows, at positions from
    `begin`."""
    n_layer, name = work.spec.n_layer, work.trail.name("shares", plan, chunk, begin, share)
    arrays = work.trail.found(name)
    if arrays is not None:
        return {key: np.array(arrays[f"{key[1]}{key[0]}"]) for key in rows}
    on_host = torch.device(work.device).type == "cpu"
    journal = work.trail.journal(name, n_layer, layers=on_host)
    model = Compressed(work, plan, rows, chunk[:1], repeats=False, journal=journal)
    model.read(chunk, begin)
    above = model.resumed()
    if above is None:
        exact, cached = model.up(keep=True, bar=bar)
        _, above = model.divergence(exact, cached, slice(chunk.shape[1] // 4, -1))
        above = above * share
    model.down(above, bar)
    found = {}
    for key, own in rows.items():
        slope = own.alpha.grad
        assert slope is not None
        found[key], own.alpha.grad = slope.double().cpu().numpy(), None
    work.trail.keep(name, {f"{side}{layer}": slope for (layer, side), slope in found.items()})
    return found


def corrected(
    candidate: Candidate,
    bought: Allotment,
    shape: Shape,
    spec: ModelSpec,
    found: Shares,
    power: float = 1.0,
) -> Candidate:
    """The candidate that `bought` was chosen from, its distortions multiplied by measured over predicted
    parts: they are in nats per token then. A segment's own factor is drawn to that of its side, and this one
    to that of all. power: of how far each is from that of all."""
    tables, where = list(candidate.tables), places(candidate, shape, spec)
    own = {key: [_predicted(bought, index) for index in where[key]] for key in found}
    total = sum(float(part.sum()) for parts in own.values() for part in parts)
    whole = sum(float(part.sum()) for part in found.values()) / max(total, 1e-30)
    if not whole > 0:
        return candidate
    for key, measured in found.items():
        predicted = np.concatenate(own[key])
        mean = PRIOR * predicted.mean()
        side = (measured.sum() + mean * whole) / max(predicted.sum() + mean, 1e-30)
        side = float(np.clip(side, whole * LEAST, whole * MOST))
        ratio = (measured + mean * side) / np.maximum(predicted + mean, 1e-30)
        factors = whole * np.clip(ratio / whole, LEAST, MOST) ** power
        ends = np.cumsum([len(part) for part in own[key]])
        for index, part in zip(where[key], np.split(factors, ends[:-1]), strict=True):
            tables[index] = _scaled(tables[index], bought.cut.widths[index], part, shape.widths)
    return replace(candidate, tables=tables)


def _predicted(bought: Allotment, index: int) -> F64:
    """Of every segment of a group, as it is counted while formats are chosen."""
    table, formats = bought.cut.groups[index][0], bought.choices[index].formats
    dropped = formats == table.distortion.shape[1] - 1
    chosen: F64 = table.distortion[np.arange(len(formats)), formats] * np.where(dropped, DROP_PENALTY, 1.0)
    return chosen


def _scaled(group: Group, width: int, factors: F64, widths: Sequence[int]) -> Group:
    """factors: of the segments of `width` channels. Those of the group's other tables, whose segments have
    `widths`, are the means over channels."""
    by_channel, made = np.repeat(factors, width), []
    for table, own in zip(group, widths, strict=True):
        begins = np.arange(len(table.cost)) * own
        counts = np.diff(np.append(begins, len(by_channel)))
        means = np.add.reduceat(by_channel, begins) / counts
        # as a master file holds them: the same plan there
        distortion = (table.distortion * means[:, None]).astype(np.float32).astype(np.float64)
        made.append(replace(table, distortion=distortion))
    return made
