"""What the same error in many tokens costs.

Fisher moments take errors of different tokens as independent. Errors of rounding are, nearly; what a dropped
coordinate takes from a row is not: in layer 0 of Qwen2.5-Coder-1.5B, whose keys have biases of up to 354,
that is much the same in every token, and so is what it does to every score. With c the gradient of a window's
log-likelihood ratios (calibrate/head.py) by the share of a coordinate that is dropped from all tokens,
½ E[c²] is what dropping it costs. In SmolLM2-135M that is 0.1 to 200 times as much as for independent errors.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from latentkv.console.progress import stage
from latentkv.plan.allocation import Table

from ..calibrate import head
from ..compute import floats
from ..compute.arithmetic import model_arithmetic
from ..course import CHOOSE
from ..fuse import energy
from ..ir import F64, FULL, SIDES, LayerPlan, ModelSpec, Plan, SidePlan
from ..work import Work
from .allotment import DROP_PENALTY
from .candidates import Candidate, Shape, cut, places
from .compressed import Compressed
from .read_back import Replaced

PRIOR = 1.0  # windows' worth of DROP_PENALTY times the independent cost, which what is measured is drawn to
Pulls = Mapping[tuple[int, str], F64]  # by layer and side: [windows, channels of all groups], a token's share


class Dropped(Replaced):
    """Rows from which shares of their coordinates are dropped: 0 of each. Every window has its own."""

    def __init__(self, work: Work, plan: SidePlan, layer: int, side: str, n_windows: int) -> None:
        super().__init__(work, replace(plan, formats=None), layer, side)
        moved = partial(floats.tensor, device=work.device)
        bases = work.bases(layer, side, plan.group)
        self.factors = [(moved(basis.down).float(), moved(basis.up).float()) for basis in bases]
        n, device = sum(len(up) for _, up in self.factors), self.factors[0][0].device
        self.shares = [torch.zeros(n, device=device, requires_grad=True) for _ in range(n_windows)]
        self.part = 0

    @property
    def parameters(self) -> Sequence[Tensor]:
        return self.shares

    def live(self) -> Dropped:
        return self

    def noting(self, part: int) -> Dropped:
        made = copy.copy(self)
        made.part = part
        return made

    def __call__(self, x: Tensor) -> Tensor:
        parts = self.about_mean(x).split([len(down) for down, _ in self.factors], dim=1)
        shares = self.shares[self.part].split([len(up) for _, up in self.factors])
        pairs = zip(parts, self.factors, shares, strict=True)
        return x - torch.cat([((part @ down) * share) @ up for part, (down, up), share in pairs], 1)

    def taken(self, n: int) -> list[F64]:
        """[channels] the gradients by the shares of the first n windows, which are 0 afterwards."""
        found = [share.grad for share in self.shares[:n]]
        for share in self.shares:
            share.grad = None
        return [slope.double().cpu().numpy() for slope in found if slope is not None]


def pulls(work: Work, shape: Shape, candidate: Candidate, windows: NDArray[np.int64]) -> Pulls:
    """Of windows [n, window], at positions up to the served context."""
    plan = _whole(work.spec, shape, candidate)
    model = Compressed(work, plan, {}, windows[:1], repeats=False)
    size = model.noted(windows)  # windows at once
    model.rows = rows = {
        (layer, side): Dropped(work, plan.layers[layer].side(side), layer, side, size)
        for layer in work.spec.row_layers
        for side in SIDES
    }
    found: dict[tuple[int, str], list[F64]] = {key: [] for key in rows}
    rng = np.random.default_rng([work.seed, len(windows)])
    last = max(0, (plan.fitted_context or 0) - windows.shape[1])
    generator = torch.Generator(model.device).manual_seed(work.seed + 1)
    with model_arithmetic(work.device), stage(2 * len(windows), CHOOSE, "run") as bar:
        for begin in range(0, len(windows), size):
            chunk = windows[begin : begin + size]
            model.read(chunk, int(rng.integers(0, last + 1)))
            _, outputs = model.up(keep=True, both=False)
            bar.update(len(chunk))
            slopes = [head.drawn_slope(model, output[None], generator) for output in outputs]
            model.down(torch.stack(slopes))
            for key, own in rows.items():
                found[key] += [slope / windows.shape[1] ** 0.5 for slope in own.taken(len(chunk))]
            bar.update(len(chunk))
    return {key: np.stack(parts) for key, parts in found.items()}


def _whole(spec: ModelSpec, shape: Shape, candidate: Candidate) -> Plan:
    """All coordinates of all rows."""

    def side(layer: int, name: str) -> SidePlan:
        group, own = candidate.group(spec, layer, name), spec.at(layer).of_side(name)
        return shape.side(name, group, ((group * own.head_dim,),) * (own.n_kv // group))

    layers = (
        LayerPlan(side(layer, "k"), side(layer, "v")) if spec.makes_rows(layer) else LayerPlan(FULL, FULL)
        for layer in range(spec.n_layer)
    )
    return replace(shape.regions("f16"), layers=tuple(layers))


def counted(candidate: Candidate, shape: Shape, spec: ModelSpec, found: Pulls) -> Candidate:
    """The candidate with what errors that are alike in many tokens cost in its distortions: of dropped
    segments, and of the part of a segment that levels take from every token."""
    tables = list(candidate.tables)
    for (layer, side), where in places(candidate, shape, spec).items():
        width = candidate.group(spec, layer, side) * spec.at(layer).of_side(side).head_dim
        for at, index in enumerate(where):
            own = found[layer, side][:, at * width : (at + 1) * width]
            pairs = zip(tables[index], shape.widths, strict=True)
            tables[index] = tuple(_counted(table, own, cut(width, each), shape) for table, each in pairs)
    return replace(candidate, tables=tables)


def _counted(table: Table, pulled: F64, widths: Sequence[int], shape: Shape) -> Table:
    """pulled [windows, channels] of the group."""
    begins = np.cumsum((0, *widths[:-1]))
    # Coordinates are uncorrelated: their costs add up. The square of a segment's own gradient is the same on
    # the mean, but its logarithm spreads three times as much.
    measured = 0.5 * np.add.reduceat(pulled**2, begins, axis=1)  # nats of every segment, by window
    alone = table.distortion[:, -1]
    together = (measured.sum(0) + PRIOR * DROP_PENALTY * alone) / (len(measured) + PRIOR)
    taken = np.array([energy.taken(name, shape.regains) for name in shape.formats])
    distortion = table.distortion + taken**2 * np.maximum(together - alone, 0)[:, None]
    distortion[:, -1] = np.maximum(together, alone) / DROP_PENALTY  # it is counted so many times
    # as a master file holds them: the same plan there
    return replace(table, distortion=distortion.astype(np.float32).astype(np.float64))
