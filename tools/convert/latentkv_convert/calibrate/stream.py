"""A source's model run one decoder layer at a time: memory is one layer, the embeddings and the hidden
states."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from latentkv.console.progress import stage
from latentkv.console.stage import Stage

from ..compute import crew
from ..course import MEASURE, WEIGH
from ..errors import ConvertError
from ..ir import Array, ModelSpec
from ..source.source import Source
from .decoder import Layer, Watch, unwatched
from .kept import Kept
from .positions import Positions
from .saved.journal import Journal

SLOPE = 4  # layers
# What a statistic has of a layer that has no K and V: a file, so that the layer counts as finished.
NOTHING: Mapping[str, Array] = {"nothing": np.zeros(0, dtype=np.float32)}
T = TypeVar("T")
Seen = Mapping[str, Tensor]


class Watcher(Protocol):
    """Is shown every layer that is run, and asked for what it saw when the text has passed."""

    def watch(self, index: int, live: nn.Module) -> None: ...

    def layer(self, index: int) -> Mapping[str, Array]: ...


class LayerStream:
    """Runs `tokens` [windows, window] through the model of a source, layer by layer, in float32. What its
    journal says is done is not done again. reduced: large products are of bf16 numbers. kept: what earlier
    passes have left of the model, and this one leaves."""

    def __init__(
        self,
        source: Source,
        tokens: NDArray[np.int64],
        device: str,
        label: str,
        journal: Journal | None = None,
        reduced: bool = False,
        kept: Kept | None = None,
    ) -> None:
        self.source, self.label, self.reduced, self.kept = source, label, reduced, kept or Kept()
        self.journal = journal or Journal(source.spec.n_layer)
        self.spec: ModelSpec = source.spec
        self.device = torch_device(device)
        self._reader = ThreadPoolExecutor(1)
        self._ahead: dict[int, Future[Layer]] = {}
        self.tokens = torch.from_numpy(tokens)
        self.ends = self.kept.ends(source, self.device, reduced)
        self.positions = Positions(self.spec, int(self.tokens.shape[1]), self.device)
        self.watchers: list[Watcher] = []
        self._windows: Sequence[int] | None = None  # of a pass; None: all

    @property
    def n_windows(self) -> int:
        return int(self.tokens.shape[0])

    def embed(self, windows: Sequence[int] | None = None) -> Tensor:
        """Input of the first layer, [windows, window, d] on the CPU. windows: some of them."""
        tokens = self.tokens if windows is None else self.tokens[list(windows)]
        with torch.no_grad():
            return torch.cat([self.ends.embed(window[None].to(self.device)).cpu() for window in tokens])

    def _keep_input(self, index: int, x: Tensor) -> None:
        """The input of a layer, without what `_taken` makes anew."""
        carried = self.ends.carried
        self.journal.keep(f"h{index}", x if carried is None else carried.kept(x, index))

    def _taken(self, index: int) -> Tensor:
        x, carried = self.journal.states.take(f"h{index}"), self.ends.carried
        return x if carried is None else carried.whole(x, self.embed(self._windows))

    @contextlib.contextmanager
    def layer(self, index: int, after: int | None = None) -> Iterator[Layer]:
        """A decoder layer with its weights, without gradients, on the device; dropped on exit unless it is
        kept. after: the layer asked for next, whose weights are read meanwhile."""
        known = self.kept.layers
        if index in known:
            yield known[index]
            return
        read = self._ahead.pop(index, None)
        live = (Layer(self.source, index, self.reduced) if read is None else read.result()).to(self.device)
        if after is not None and after in range(self.spec.n_layer) and after not in known:
            self._ahead = {after: self._reader.submit(Layer, self.source, after, self.reduced)}
        for watcher in self.watchers:
            watcher.watch(index, live)
        self.kept.offer(index, live)
        yield live
        del live

    def forward(
        self, windows: Sequence[int] | None = None, *, keep: bool = False
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(layer, its input, room for its output), both [windows, window, d] on the device, of every layer
        that is left. windows: some of them. keep: every input, for `backward`."""
        first, self._windows = self.journal.reached, windows
        if first == self.spec.n_layer:
            return
        hidden = self._taken(first) if first else self.embed(windows)
        self.journal.make_room(hidden, self.spec.n_layer + 2 if keep else 2)
        if keep and not first:
            self._keep_input(0, hidden)
        hidden = hidden.to(self.device)
        for index in range(first, self.spec.n_layer):
            output = torch.empty_like(hidden)
            yield index, hidden, output
            for watcher in self.watchers:
                self.journal.write(index, watcher.layer(index), "watched")
            self._keep_input(index + 1, output)
            if not keep:
                self.journal.states.drop(f"h{index}")
            hidden = output

    def backward(
        self, slope: Callable[[int, Tensor], Tensor], bar: Stage
    ) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """(layer, its input, the loss's gradient by its output, room for that by its input), each [windows,
        window, d] on the device, of every layer that is left, the last one first, after forward(keep=True).

        slope(window, h): gradient [window, d] by the last layer's output h [1, window, d]. bar: `bar_back`,
        of which the last layer's part is done here.
        """
        states, at = self.journal.states, self.journal.returned
        if at is None:
            at = self.spec.n_layer
            hidden = self._taken(at).to(self.device)
            above = torch.empty_like(hidden)
            for row, found in enumerate(
                self.each(lambda row: slope(row, hidden[row : row + 1]), len(hidden))
            ):
                above[row] = found
                bar.update(SLOPE)
            self.journal.keep(f"g{at}", above)
            states.drop(f"h{at}")
        else:
            above = states.take(f"g{at}").to(self.device)
        for index in reversed(range(at)):
            below = torch.empty_like(above)
            yield index, self._taken(index).to(self.device), above, below
            self.journal.keep(f"g{index}", below)
            states.drop(f"g{index + 1}")
            states.drop(f"h{index}")
            above = below

    def each(self, step: Callable[[int], T], n: int) -> Iterator[T]:
        """step(0) … step(n - 1), at the same time on the cores of a processor."""
        return crew.each(step, n, self.device.type)

    def passed(
        self,
        live: Layer,
        index: int,
        hidden: Tensor,
        output: Tensor,
        bar: Stage,
        measure: Callable[[int, Seen], T],
    ) -> Iterator[T]:
        """Writes the layer's output of every window of hidden [windows, window, d].

        measure(window, seen): what to make of that window's projections and norms, which have the names that
        decoder.Layer gives them.
        """

        def step(row: int) -> T:
            seen: dict[str, Tensor] = {}
            output[row] = self.run(live, index, hidden[row : row + 1], noting(seen))[0]
            return measure(row, seen)

        for found in self.each(step, len(hidden)):
            yield found
            bar.update(1)

    def descend(
        self,
        live: Layer,
        index: int,
        inputs: Tensor,
        above: Tensor,
        below: Tensor,
        bar: Stage,
        reading: Callable[[Tensor], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        """Writes the loss's gradient by the layer's input, of `above`, that by its output, with nothing to
        measure. reading: what the layer attends in, of its input."""

        def step(row: int) -> None:
            bottom = inputs[row : row + 1].clone().requires_grad_()
            with torch.enable_grad(), reading(bottom):
                attended = live.attended(bottom, self.positions)
            past, through = live.fed_slope(bottom, attended, above[row : row + 1])
            (down,) = torch.autograd.grad(attended, bottom, through)
            below[row] = (down + past)[0]

        for _ in self.each(step, len(inputs)):
            bar.update(1)

    def advance(self, live: Layer, index: int, hidden: Tensor, output: Tensor, bar: Stage) -> None:
        """`passed` with nothing to measure."""
        for _ in self.passed(live, index, hidden, output, bar, lambda window, seen: None):
            pass

    def run(self, live: Layer, index: int, hidden: Tensor, watch: Watch = unwatched) -> Tensor:
        """Output [1, window, d] of layer `index` for one window's input, on the device.

        Raises:
            ConvertError: the output is not finite.
        """
        return self.finite(index, live(hidden.to(self.device), self.positions, watch))

    def finite(self, index: int, output: Tensor) -> Tensor:
        """The output of layer `index`.

        Raises:
            ConvertError: it is not finite.
        """
        if not torch.isfinite(output).all():
            raise ConvertError(
                f"layer {index}", "finite activations on the calibration text", "NaN or infinity"
            )
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        """[window, n_vocab] from the last layer's output [1, window, d]."""
        return self.ends.logits(hidden)[0]

    def bar(self, passes: int = 1, n_windows: int | None = None) -> Stage:
        """Progress over what is left on the way up, in `passes` through every layer."""
        n, left = n_windows or self.n_windows, self.spec.n_layer - self.journal.reached
        return stage(passes * left * n, MEASURE, "window", passes * self.spec.n_layer * n)

    def bar_back(self, n_windows: int | None = None) -> Stage:
        """Progress over what is left on the way down, for `backward` and its callers: a step is a window's
        gradient by the last layer's output, which takes as long as SLOPE layers, or by a layer's input."""
        n, at = n_windows or self.n_windows, self.journal.returned
        left = self.spec.n_layer + SLOPE if at is None else at
        return stage(left * n, WEIGH, "window", (self.spec.n_layer + SLOPE) * n)


def noting(seen: dict[str, Tensor]) -> Watch:
    """For Layer, to keep what it shows."""

    def note(name: str, rows: Tensor) -> Tensor:
        seen[name] = rows
        return rows

    return note


def added(total: dict[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Adds sums to those of other windows."""
    for name, sums in found.items():
        total[name] = total[name].add_(sums) if name in total else sums


def torch_device(name: str) -> torch.device:
    """Raises ConvertError for one that torch cannot use."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0].split(". ")[0][:120]
        raise ConvertError("--device", "a device that torch can use", f"{name} ({why})") from None
    return device
