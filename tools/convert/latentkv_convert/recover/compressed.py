"""The compressed model beside the uncompressed one, a layer at a time, with gradients of what is trained.

Memory holds a step's hidden states, one layer's activations of one window, and as many layers as there is
room for; the others are read again in every pass.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..calibrate import head
from ..calibrate.decoder import Layer
from ..calibrate.positions import Positions
from ..calibrate.stream import LayerStream
from ..calibrate.two_copies import TwoCopies
from ..course import n_weights
from ..ir import SIDES, Plan
from ..plan.forecast import Copies
from ..rows import sizes
from ..work import Work
from .trained_rows import TrainedRows

ROOM = 0.5  # share of the free memory that layers are kept in
SHELF = 1 << 30  # bytes of hidden states that stay on a device; more are moved to the host

TOGETHER = 1 << 24  # numbers of hidden states

Rows = Mapping[tuple[int, str], TrainedRows]  # by layer and side
Live = Mapping[str, TrainedRows]  # of one layer


class Compressed(LayerStream):
    """A plan's model, on windows of one length that `read` puts in."""

    def __init__(self, work: Work, plan: Plan, rows: Rows, windows: NDArray[np.int64]) -> None:
        device = torch.device(work.device)
        self._room = int(ROOM * _free_bytes(device))
        reduced = device.type == "cuda" and 4 * n_weights(work.source) > self._room
        super().__init__(work.source, windows, work.device, "polish", reduced=reduced)
        self.work, self.plan, self.rows = work, plan, rows
        self.batch = sizes.demotion_batch() if plan.recent else 1
        self._layers: dict[int, Layer] = {}

    def read(self, windows: NDArray[np.int64], begin: int = 0) -> None:
        """begin: position of the first token."""
        self.tokens = torch.from_numpy(windows)
        self.positions = Positions(self.spec, windows.shape[1], self.device, begin)

    @contextlib.contextmanager
    def layer(self, index: int, after: int | None = None) -> Iterator[Layer]:
        """Kept as far as there is room."""
        if index in self._layers:
            yield self._layers[index]
            return
        with super().layer(index, None if after in self._layers else after) as live:
            size = sum(each.nbytes for each in live.parameters())
            if size <= self._room:
                self._room -= size
                self._layers[index] = live
            yield live

    def parts(self) -> list[slice]:
        """Windows that go through a layer together: on a device, whose launches are most of a small model's
        time, as many as there is memory for."""
        n, window = self.tokens.shape
        size = 1 if self.device.type == "cpu" else max(1, TOGETHER // (window * self.spec.n_embd))
        return [slice(begin, min(begin + size, n)) for begin in range(0, n, size)]

    def up(self, keep: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Last outputs [windows, window, d] of the uncompressed model and of the compressed one; and, to go
        down from, the inputs of all of its layers."""
        exact = self.embed().to(self.device)
        cached, inputs, parts = exact.clone(), [], self.parts()
        is_much = cached.nbytes * self.spec.n_layer > SHELF
        with torch.no_grad():
            for index in range(self.spec.n_layer):
                if keep:
                    inputs.append(cached.to("cpu" if is_much else self.device, copy=True))
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

                    for _ in self.each(step, 2 * len(parts)):
                        pass
        return exact, cached, inputs

    def down(self, inputs: list[Tensor], above: Tensor) -> None:
        """Adds to the gradients of what is trained, from those by the last outputs. Empties inputs."""
        parts = self.parts()
        for index in reversed(range(self.spec.n_layer)):
            own = [self.rows[index, side] for side in SIDES if (index, side) in self.rows]
            wanted = [parameter for rows in own for parameter in rows.parameters]
            noted = inputs[-1].device == self.device
            kept = inputs.pop().to(self.device)
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


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
