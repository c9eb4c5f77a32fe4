"""Rows of one layer's K or V through factors that are trained."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ..compute import floats
from ..fuse.rotation import finished
from ..ir import Basis, SidePlan
from ..plan.read_back import Replaced
from ..rows import cached_rows
from ..work import Work

FLOOR = 1e-4  # of the largest spread of a channel, and of its largest weight


class TrainedRows(Replaced):
    """What is trained is added to down and up in coordinates where every number costs the same: with M the
    rows' second moment, F their Fisher moment and D, U a basis of unit spread and one of unit weight,

    down' = down + D P diag(1/w), w² the diagonal of up F upᵀ, and up' = up + diag(1/s) Q U, s² that of
    downᵀ M down: a number p of P or Q costs about ½ p² nats. P and Q begin as zeros.
    """

    def __init__(self, work: Work, plan: SidePlan, layer: int, side: str, context: int | None) -> None:
        super().__init__(work, plan, layer, side)
        moved = partial(floats.tensor, device=work.device)
        cached = cached_rows.of(work, layer, side, plan.path, context)
        self.bases = finished(work, plan, layer, side)
        self.groups = []
        self.notes: dict[int, Tensor] = {}
        self.part: int | None = None
        begin = 0
        for basis, whole in zip(self.bases, work.bases(layer, side, plan.group), strict=True):
            block = slice(begin, begin + len(basis.down))
            begin = block.stop
            moment, fisher = moved(cached.moment[block, block]), moved(cached.fisher[block, block])
            self.groups.append(Group(basis, whole, moment.double(), fisher.double()))

    @property
    def parameters(self) -> list[Tensor]:
        return [each for group in self.groups for each in (group.p, group.q)]

    def load(self, values: Sequence[Tensor]) -> None:
        """Values of all parameters."""
        with torch.no_grad():
            for parameter, value in zip(self.parameters, values, strict=True):
                parameter.copy_(value)

    def live(self) -> TrainedRows:
        """These rows through factors that gradients, where they are asked for, go back through."""
        made = copy.copy(self)
        made.factors = [group.factors() for group in self.groups]
        return made

    def noting(self, part: int) -> TrainedRows:
        """With a place for what the cache returns for this part of the windows, from the way up to the way
        down."""
        made = copy.copy(self)
        made.part = part
        return made

    def held(self, latent: Tensor) -> Tensor:
        if self.part is None:
            return super().held(latent)
        if self.part not in self.notes:
            self.notes[self.part] = super().held(latent)
            return self.notes[self.part]
        return self.notes.pop(self.part)

    def trained(self) -> tuple[Basis, ...]:
        """As they go into the file."""
        with torch.no_grad():
            pairs = [[factor.double().cpu().numpy() for factor in group.factors()] for group in self.groups]
        return tuple(
            replace(basis, down=down, up=up) for basis, (down, up) in zip(self.bases, pairs, strict=True)
        )


class Group:
    """One latent's factors. basis: as in the file; whole: of full rank."""

    def __init__(self, basis: Basis, whole: Basis, moment: Tensor, fisher: Tensor) -> None:
        down, up, full_down, full_up, sigma = (
            floats.tensor(each, str(moment.device)).double()
            for each in (basis.down, basis.up, whole.down, whole.up, whole.sigma)
        )
        sigma = sigma.clamp_min(FLOOR * sigma.max())  # both the moment of a channel and its weight
        spread = _root((down.T @ moment @ down).diagonal())
        weight = _root((up @ fisher @ up.T).diagonal())
        self.down, self.up = down.float(), up.float()
        self._rows, self._columns = (full_down / sigma.sqrt()).float(), (1 / weight).float()
        self._axes, self._channels = (full_up / sigma.sqrt()[:, None]).float(), (1 / spread).float()[:, None]
        self.p = nn.Parameter(torch.zeros_like(self.down))
        self.q = nn.Parameter(torch.zeros_like(self.up))

    def factors(self) -> tuple[Tensor, Tensor]:
        """down [w, r] and up [r, w]."""
        down = self.down + self._rows @ self.p * self._columns
        return down, self.up + self._channels * (self.q @ self._axes)


def _root(moments: Tensor) -> Tensor:
    root = moments.clamp_min(0).sqrt()
    return root.clamp_min(FLOOR * root.max()) if root.max() > 0 else torch.ones_like(root)
