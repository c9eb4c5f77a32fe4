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

from latentkv.console.stage import Stage

from ..calibrate import head
from ..calibrate.decoder import Layer
from ..calibrate.positions import Positions
from ..calibrate.saved.journal import Journal
from ..calibrate.saved.states import States
from ..calibrate.stream import NOTHING, LayerStream
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
    are kept as far as there is room. journal: what is left of one pass up and down, which goes on from there;
    layers' arrays are gradients."""

    def __init__(
        self,
        work: Work,
        plan: Plan,
        rows: Parts,
        windows: NDArray[np.int64],
        repeats: bool,
        journal: Journal | None = None,
    ) -> None:
        work.kept.make_room(work.source, torch.device(work.device), repeats)
        super().__init__(work.source, windows, work.device, "check", journal, work.kept.reduced, work.kept)
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

    def up(self, keep: bool, both: bool = True, bar: Stage | None = None) -> tuple[Tensor, Tensor]:
        """Last outputs [windows, window, d] of the uncompressed model and of the compressed one. keep: what
        `down` needs. both: else the uncompressed model is not run. bar: counts layers."""
        first, is_kept = self.journal.reached, self.journal.folder is not None
        exact, cached = (self._begun(name, first) for name in ("e", "h"))
        parts, is_much = self.parts(), is_kept or cached.nbytes * self.spec.n_layer > SHELF
        if is_kept and not first:
            self.journal.make_room(cached, self.spec.n_layer + 4)
            is_kept = self.journal.states.folder is not None
        with torch.no_grad():
            for index in range(first, self.spec.n_layer):
                if keep and not is_kept:
                    self._keep(index, cached, is_much)
                elif is_kept and not index:
                    self.journal.keep("h0", cached.clone())
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
                if is_kept:  # the exact one first: with h, a layer is done
                    self.journal.keep(f"e{index + 1}", exact.clone())
                    self.journal.keep(f"h{index + 1}", cached.clone())
                    self.journal.states.drop(f"e{index}")
                if bar is not None:
                    bar.update(1)
        return exact, cached

    def _begun(self, name: str, first: int) -> Tensor:
        """Hidden states of a model before layer `first`."""
        return self.journal.states.take(f"{name}{first}") if first else self.embed().to(self.device)

    def _keep(self, index: int, inputs: Tensor, is_much: bool) -> None:
        if is_much:
            self._shelf.keep(f"h{index}", inputs.clone() if self.device.type == "cpu" else inputs)
        else:
            self._inputs[index] = inputs.clone()

    def down(self, above: Tensor, bar: Stage | None = None) -> None:
        """Adds to the gradients of all parameters, from those by the last outputs, after up(keep=True)."""
        parts, journal, at = self.parts(), self.journal, self.spec.n_layer
        is_kept = journal.states.folder is not None
        if is_kept and journal.returned is None:
            journal.keep(f"g{at}", above)
            for name in ("h", "e"):
                journal.states.drop(f"{name}{at}")
        for index in reversed(range(at if journal.returned is None else journal.returned)):
            own = [self.rows[index, side] for side in SIDES if (index, side) in self.rows]
            wanted = [parameter for rows in own for parameter in rows.parameters]
            noted, shelf = index in self._inputs, journal.states if is_kept else self._shelf
            kept = self._inputs.pop(index) if noted else shelf.take(f"h{index}").to(self.device)
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
            if is_kept:
                arrays = {str(i): x.grad.numpy() for i, x in enumerate(wanted) if x.grad is not None}
                journal.write(index, arrays or NOTHING)
                journal.keep(f"g{index}", below)
                journal.states.drop(f"g{index + 1}")
            shelf.drop(f"h{index}")
            if bar is not None:
                bar.update(1)
            above = below

    def resumed(self) -> Tensor | None:
        """The gradients that `down` begins with, if an earlier run has come so far: those of the layers above
        are their parameters' then."""
        at = self.journal.returned
        if at is None:
            return None
        for index in range(at, self.spec.n_layer):
            found = self.journal.read(index)
            own = [self.rows[index, side] for side in SIDES if (index, side) in self.rows]
            for i, parameter in enumerate(parameter for rows in own for parameter in rows.parameters):
                if str(i) in found:
                    parameter.grad = torch.from_numpy(np.array(found[str(i)]))
        return self.journal.states.take(f"g{at}")

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
