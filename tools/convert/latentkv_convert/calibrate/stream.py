"""A source's model run one decoder layer at a time: memory is one layer, the embeddings and the hidden
states."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .. import progress
from ..errors import ConvertError
from ..ir import ModelSpec
from ..source.source import Source
from .decoder import Ends, Layer
from .positions import Positions


class LayerStream:
    """Runs `tokens` [windows, window] through the model of a source, layer by layer, in float32."""

    def __init__(self, source: Source, tokens: NDArray[np.int64], device: str, label: str) -> None:
        self.source, self.label = source, label
        self.spec: ModelSpec = source.spec
        self.device = _device(device)
        self._reader = ThreadPoolExecutor(1)
        self._ahead: dict[int, Future[Layer]] = {}
        self.tokens = torch.from_numpy(tokens)
        self.ends = Ends(source).to(self.device)
        self.positions = Positions(self.spec, int(self.tokens.shape[1]), self.device)
        self.watchers: list[Callable[[int, nn.Module], None]] = []  # are shown every layer that is run

    @property
    def n_windows(self) -> int:
        return int(self.tokens.shape[0])

    def embed(self) -> Tensor:
        """Input of the first layer, [windows, window, d] on the CPU."""
        with torch.no_grad():
            return torch.cat([self.ends.embed(window[None].to(self.device)).cpu() for window in self.tokens])

    @contextlib.contextmanager
    def layer(self, index: int, after: int | None = None) -> Iterator[Layer]:
        """A decoder layer with its weights, without gradients, on the device; dropped on exit. after: the
        layer asked for next, whose weights are read while a GPU is at work on this one."""
        read = self._ahead.pop(index, None)
        live = (Layer(self.source, index) if read is None else read.result()).to(self.device)
        if after in range(self.spec.n_layer) and self.device.type != "cpu":
            assert after is not None
            self._ahead = {after: self._reader.submit(Layer, self.source, after)}
        for watch in self.watchers:
            watch(index, live)
        yield live
        del live

    def run(self, live: nn.Module, index: int, hidden: Tensor) -> Tensor:
        """Output [1, window, d] of layer `index` for one window's input, on the device.

        Raises:
            ConvertError: the output is not finite.
        """
        output: Tensor = live(hidden.to(self.device), self.positions)
        if not torch.isfinite(output).all():
            raise ConvertError(
                f"layer {index}", "finite activations on the calibration text", "NaN or infinity"
            )
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        """[window, n_vocab] from the last layer's output [1, window, d]."""
        return self.ends.logits(hidden)[0]

    def loss(self, window: int, hidden: Tensor) -> Tensor:
        """Mean next-token negative log-likelihood of a window in nats, from the last layer's output [1,
        window, d]."""
        labels = self.tokens[window].to(self.device)
        return torch.nn.functional.cross_entropy(self.logits(hidden)[:-1], labels[1:])

    def bar(self, passes: int = 1) -> Any:
        total = passes * self.spec.n_layer * self.n_windows
        return progress.bar(total, f"calibrate {self.label}", "window")


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConvertError(
            "--device", "a device that torch can use", f"{name} ({str(error).splitlines()[0]})"
        ) from None
    return device
