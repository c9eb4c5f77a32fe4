"""What copies.py measures, estimated on one way up through the model (`--quick`): no gradient of the loss.

A copy's error reaches the rest of the model through the attention that reads it. With u independent normal
numbers for every channel of what attention adds to the hidden state, and g the product of u with that
branch's Jacobian by one token's copy, E[g gᵀ] weighs an error by what it does to the hidden state: for v Σ p²
W_oᵀ W_o over the queries that read it, p their softmax weights; for k Σ p² |W_o (v - o)|² q qᵀ, o what they
mix.

What the hidden state's errors cost is measured on a disturbed copy of one window, which runs beside it: layer
by layer how much a disturbance grows, and at the top how many nats it is. That is one number per layer, and
so all directions and tokens of a hidden state count alike, which the loss's gradient knows better.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ..ir import SIDES, Array
from . import copies, head
from .copies import Meter, Tap
from .decoder import Layer
from .heads import norm_module
from .stream import LayerStream
from .two_copies import TwoCopies

VERSION = 2
STANDS_FOR = "copies"
SIZE = 1e-2  # of the hidden state: far above f32's rounding, and small enough to grow in proportion

sample, settings = copies.sample, copies.settings


def collect(stream: LayerStream, sink: int, recent: int, seed: int) -> Iterator[tuple[int, dict[str, Array]]]:
    """The arrays of copies.py, *_fisher in squared hidden state; gain and own [1], by which the square of a
    disturbance of the layer's input, or of what attention adds, grows up to its output; and of the last layer
    nats [1], that a square of 1 a token costs there."""
    copies.check_window(stream, sink, recent)
    windows, _ = copies.split(stream.n_windows)
    last = stream.spec.n_layer - 1
    with stream.bar(n_windows=len(windows)) as bar:
        for index, hidden, output in stream.forward([*windows, windows[0]]):
            generator = torch.Generator(stream.device).manual_seed(seed + index)
            with stream.layer(index, index + 1) as live:
                arrays = _layer(stream, live, index, hidden[:-1], output, sink, recent, generator, bar)
                arrays |= _disturbed(stream, live, index, hidden, output, sink, generator)
            if index == last:
                arrays["nats"] = _nats(stream, output, sink)
            yield index, arrays


def complete(layers: Sequence[Mapping[str, Array]]) -> list[Mapping[str, Array]]:
    """With *_fisher in nats, as copies.py has it."""
    above = np.cumprod([2 * layers[-1]["nats"][0], *(layer["gain"][0] for layer in layers[:0:-1])])[::-1]
    return [_Priced(each, float(each["own"][0] * price)) for each, price in zip(layers, above, strict=True)]


class _Priced(Mapping[str, Array]):
    def __init__(self, arrays: Mapping[str, Array], price: float) -> None:
        self.arrays, self.price = arrays, price

    def __getitem__(self, name: str) -> Array:
        array = self.arrays[name]
        return array * self.price if name.endswith("_fisher") else array

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)


def _layer(
    stream: LayerStream,
    live: Layer,
    index: int,
    hidden: Tensor,
    output: Tensor,
    sink: int,
    recent: int,
    generator: torch.Generator,
    bar: object,
) -> dict[str, Array]:
    """Runs the windows of `hidden` [n, window, d], fills `output` and measures the copies."""
    norm = norm_module(stream.spec, "k")
    leaves = [live.get_submodule(f"attn_{side}").register_forward_hook(_leaf) for side in SIDES]
    taps = {side: Tap(stream, live, side) for side in SIDES}
    if norm is not None:
        taps["normed"] = Tap(stream, live, "k", norm)
    meters = {name: Meter(stream, len(hidden), sink) for name in taps}
    for row in range(len(hidden)):
        x = hidden[row : row + 1]
        with TwoCopies(stream.spec.n_kv, sink, recent) as nodes:
            attended = live.attended(x, stream.positions)
        key, _ = nodes.found()
        probe = torch.randn(attended.shape, generator=generator, device=stream.device)
        torch.autograd.grad(attended, [taps[side].seen() for side in SIDES], probe, retain_graph=True)
        slopes = copies.as_projected(taps, key, *nodes.slopes())
        for name, meter in meters.items():
            meter.add(taps[name].values(), slopes[name])
        with torch.no_grad():
            output[row] = stream.finite(index, live.fed(x, attended.detach()))[0]
        bar.update(1)  # type: ignore[attr-defined]
    for leaf in leaves:
        leaf.remove()
    return {key: array for name, meter in meters.items() for key, array in meter.result(name).items()}


def _leaf(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Where gradients end."""
    return output.detach().requires_grad_()


@torch.no_grad()
def _disturbed(
    stream: LayerStream,
    live: Layer,
    index: int,
    hidden: Tensor,
    output: Tensor,
    sink: int,
    generator: torch.Generator,
) -> dict[str, Array]:
    """Runs the last row of `hidden`, the first one disturbed, every token brought back to SIZE. gain: how the
    square of what comes from below grows; own: that of new noise in what attention has added."""
    exact = hidden[0]
    size = SIZE * exact[sink:].norm(dim=-1).median()
    new = torch.randn(exact.shape, generator=generator, device=exact.device)
    below = hidden[-1] - exact if index else new
    below, new = (size * noise / noise.norm(dim=-1, keepdim=True).clamp_min(1e-30) for noise in (below, new))
    output[-1] = stream.run(live, index, (exact + below)[None])[0]
    attended = live.attended(exact[None], stream.positions)
    fed = live.fed(exact[None], attended + new)[0]
    grown = {"gain": (output[-1], below), "own": (fed, new)}
    squares = {
        name: _square(after - output[0], sink) / _square(noise, sink)
        for name, (after, noise) in grown.items()
    }
    return {name: np.array([square]) for name, square in squares.items()}


@torch.no_grad()
def _nats(stream: LayerStream, output: Tensor, sink: int) -> Array:
    """Divergence of the disturbed window's predictions, over the square of the disturbance, per token."""
    divergence = head.divergence(stream, output[0, sink:], output[-1, sink:])
    return np.array([divergence / _square(output[-1] - output[0], sink)])


def _square(x: Tensor, sink: int) -> float:
    return float(x[sink:].double().square().sum(-1).mean())
