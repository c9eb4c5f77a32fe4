"""The compressed model beside the uncompressed one, a layer at a time, with gradients by numbers of its rows.

Memory holds the hidden states of all layers, one layer's activations of one window, and as many layers as
there is room for; the others are read again in every pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..calibrate import head
from ..calibrate.decoder import Layer
from ..calibrate.positions import Positions
from ..calibrate.saved.states import States
from ..calibrate.stream import LayerStream
from ..calibrate.two_copies import TwoCopies
from ..ir import SIDES, Plan
from ..rows import sizes
from ..work import Work
from .read_back import Copies, Replaced

SHELF = 1 << 30  # bytes of hidden states that stay on a device; more are moved to the host
TOGETHER = 1 << 24  # numbers of hidden states that go through a layer together on a device


class Part(Protocol):
    """One side of a layer, with numbers whose gradients are asked for."""

    @property
    def parameters(self) -> Sequence[Tensor]: ...
    def live(self) -> Part:
        """With what gradients go back through to the parameters."""

    def noting(self, part: int) -> Replaced:
        """With a place for what the cache returns for this part of the windows, from the way up to the way
        down."""


Parts = Mapping[tuple[int, str], Part]  # by layer and side
Live = Mapping[str, Any]  # of one layer


class Compressed(LayerStream):
    """A plan's model, on windows of one length that `read` puts in. repeats: it does so many times, so layers
    are kept as far as there is room."""

    def __init__(
        self, work: Work, plan: Plan, rows: Parts, windows: NDArray[np.int64], repeats: bool
    ) -> None:
        work.kept.make_room(work.source, torch.device(work.device), repeats)
        super().__init__(work.source, windows, work.device, "check", None, work.kept.reduced, work.kept)
        self.work, self.plan, self.rows = work, plan, rows
        self.batch = sizes.demotion_batch() if plan.recent else 1
        self._inputs: dict[int, Tensor] = {}
        self._shelf = States()

    def read(self, windows: NDArray[np.int64], begin: int = 0) -> None:
        """begin: position of the first token."""
        self.tokens = torch.from_numpy(windows)
        self.positions = Positions(self.spec, windows.shape[1], self.device, begin)

    def parts(self) -> list[slice]:
        """Windows that go through a layer together: on a device, whose launches are most of a small model's
        time, as many as there is memory for."""
        n, window = self.tokens.shape
        alone = self.device.type == "cpu" or self.spec.mla is not None
        size = 1 if alone else max(1, TOGETHER // (window * self.spec.n_embd))
        return [slice(begin, min(begin + size, n)) for begin in range(0, n, size)]

    def up(self, keep: bool, both: bool = True) -> tuple[Tensor, Tensor]:
        """Last outputs [windows, window, d] of the uncompressed model and of the compressed one. keep: what
        `down` needs. both: else the uncompressed model is not run."""
        exact = self.embed().to(self.device)
        cached, parts = exact.clone(), self.parts()
        is_much = cached.nbytes * self.spec.n_layer > SHELF
        with torch.no_grad():
            for index in range(self.spec.n_layer):
                if keep:
                    self._keep(index, cached, is_much)
                rows = self._live(index)
                with self.layer(index, index + 1) as live:

                    def step(task: int, index: int = index, live: Layer = live, rows: Live = rows) -> None:
                        part = parts[task % len(parts)]
                        if task >= len(parts):
                            exact[part] = self.run(live, index, exact[part])
                            return
                        note = task if keep and not is_much else None
                        with self._reading(live, index, cached[part], rows, note):
                            cached[part] = self.run(live, index, cached[part])

                    for _ in self.each(step, (2 if both else 1) * len(parts)):
                        pass
        return exact, cached

    def _keep(self, index: int, inputs: Tensor, is_much: bool) -> None:
        if is_much:
            self._shelf.keep(f"h{index}", inputs.clone() if self.device.type == "cpu" else inputs)
        else:
            self._inputs[index] = inputs.clone()

    def down(self, above: Tensor) -> None:
        """Adds to the gradients of all parameters, from those by the last outputs, after up(keep=True)."""
        parts = self.parts()
        for index in reversed(range(self.spec.n_layer)):
            own = [self.rows[index, side] for side in SIDES if (index, side) in self.rows]
            wanted = [parameter for rows in own for parameter in rows.parameters]
            noted = index in self._inputs
            kept = self._inputs.pop(index) if noted else self._shelf.take(f"h{index}").to(self.device)
            self._shelf.drop(f"h{index}")
            below = torch.empty_like(above)
            with self.layer(index, index - 1) as live:

                def step(
                    task: int,
                    index: int = index,
                    live: Layer = live,
                    kept: Tensor = kept,
                    above: Tensor = above,
                    below: Tensor = below,
                    wanted: list[Tensor] = wanted,
                    noted: bool = noted,
                ) -> tuple[Tensor | None, ...]:
                    part = parts[task]
                    bottom = kept[part].clone().requires_grad_()
                    note = task if noted else None
                    with torch.enable_grad(), self._reading(live, index, bottom, self._live(index), note):
                        attended = live.attended(bottom, self.positions)
                    past, through = live.fed_slope(bottom.detach(), attended.detach(), above[part])
                    found = torch.autograd.grad(attended, [bottom, *wanted], through, allow_unused=True)
                    below[part] = found[0] + past
                    return found[1:]

                for slopes in self.each(step, len(parts)):
                    for parameter, slope in zip(wanted, slopes, strict=True):
                        if slope is not None:
                            parameter.grad = slope if parameter.grad is None else parameter.grad + slope
            above = below

    def _live(self, index: int) -> Live:
        return {side: self.rows[index, side].live() for side in SIDES if (index, side) in self.rows}

    def _reading(self, live: Layer, index: int, below: Tensor, rows: Live, note: int | None) -> Any:
        """While it is entered, the layer reads what the cache returns for its input `below`. note: the part
        of the windows for which that is kept."""
        if not self.spec.attends(index):
            return contextlib.nullcontext()
        replaced = rows if note is None else {side: own.noting(note) for side, own in rows.items()}
        copies = Copies(self.work, self.plan, index, replaced)
        read, old = copies(live, below, self.positions.of(index))
        n_kv = self.spec.at(index).n_kv
        return TwoCopies(n_kv, self.plan.sink, self.plan.recent, old, self.batch, read)

    def divergence(self, exact: Tensor, cached: Tensor, scored: slice) -> tuple[list[float], Tensor]:
        """KL(exact ‖ cached) of every window, mean over its scored tokens, nats; and the gradient of their
        mean by cached [windows, window, d]."""
        slopes, found = torch.zeros_like(cached), []
        n_tokens = len(range(*scored.indices(exact.shape[1])))
        for row in range(len(exact)):
            ours, theirs, slope = exact[row, scored], cached[row, scored], slopes[row, scored]
            total = 0.0
            for block in head.blocks(self, n_tokens):
                with torch.enable_grad():
                    top = theirs[block].detach().requires_grad_()
                    p = self.logits(ours[None, block]).log_softmax(-1)
                    q = self.logits(top[None]).log_softmax(-1)
                    nats = (p.exp() * (p - q)).sum()
                    slope[block] = torch.autograd.grad(nats, top)[0] / (n_tokens * len(exact))
                total += float(nats.detach())
            found.append(total / n_tokens)
        return found, slopes
