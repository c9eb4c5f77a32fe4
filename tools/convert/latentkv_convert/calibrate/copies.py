"""What errors of the cached copies of k and v cost, in nats: Fisher moments of those copies.

g is the gradient of a window's summed log-likelihood ratios (head.drawn_slope) with respect to the body copy
(two_copies.py) of one token's v, its k as projected, or its k as it enters RoPE. With labels sampled from the
model's own prediction, F = E[g gᵀ] is the Fisher information of that copy, and ½ tr(F · E[e eᵀ]) the expected
divergence in nats per token that an independent error e causes (second order of KL(p ‖ p_e)). Labels of the
text instead would measure its gradient noise.

Layer by layer as in fisher.py: hidden states are stored going up, gradients flow down through one recomputed
layer at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..errors import ConvertError
from ..ir import SIDES, Array
from ..recipe import Recipe
from . import head
from .heads import norm_module
from .stream import LayerStream
from .two_copies import TwoCopies

VERSION = 6
N_ROWS = 2048  # real rows kept per layer and side, to measure quantizers on


def sample(recipe: Recipe) -> tuple[int, int]:
    return recipe.fisher_tokens, recipe.calib_window


def settings(recipe: Recipe) -> dict[str, int]:
    """What else the numbers depend on."""
    return {"sink": recipe.options["sink"], "recent": recipe.options["recent"], "seed": recipe.seed}


def split(n_windows: int) -> tuple[list[int], list[int]]:
    """Windows that are measured, and the eighth (at least one, of two or more) that is held back to check a
    plan on."""
    held = list(range(n_windows))[-1::-8] if n_windows > 1 else []
    return [window for window in range(n_windows) if window not in held], sorted(held)


def collect(stream: LayerStream, sink: int, recent: int, seed: int) -> Iterator[tuple[int, dict[str, Array]]]:
    """Per layer, over tokens past the sinks, for each of

    k, v: the projection's output without its bias;
    normed: k after its per-head norm, where there is one:

    *_moment, *_weighted, *_fisher [w, w] float64, E[x xᵀ], the same over tokens weighted by |g|², and E[g
    gᵀ]; *_mean, *_weighted_mean [w]; *_rows [n, w] float32, evenly spaced real rows, and *_energy [n, n_kv]
    float32, |g|² per KV head of those rows over its mean over all tokens.
    """
    check_window(stream, sink, recent)
    windows, _ = split(stream.n_windows)
    generator = torch.Generator(stream.device).manual_seed(seed)

    def slope(row: int, hidden: Tensor) -> Tensor:
        return head.drawn_slope(stream, hidden, generator)

    with stream.bar(n_windows=len(windows)) as bar:
        for index, hidden, output in stream.forward(windows, keep=True):
            with torch.no_grad(), stream.layer(index, index + 1) as live:
                for row in range(len(windows)):
                    output[row] = stream.run(live, index, hidden[row : row + 1])[0]
                    bar.update(1)
    with stream.bar_back(len(windows)) as bar:
        for index, inputs, above, below in stream.backward(slope, bar):
            yield index, _backward(stream, index, inputs, above, below, sink, recent, bar)


def check_window(stream: LayerStream, sink: int, recent: int) -> None:
    """Raises:
    ConvertError: no query of a window reads a body copy.
    """
    window_size = int(stream.tokens.shape[1])
    if window_size <= sink + recent:
        raise ConvertError(
            "--calib-window",
            f"windows longer than sink {sink} and recent {recent} together",
            f"{window_size} tokens",
        )


class Tap:
    """Keeps the output of one module's forward pass, heads flat."""

    def __init__(
        self, stream: LayerStream, live: torch.nn.Module, side: str, module: str | None = None
    ) -> None:
        tapped: Any = live.get_submodule(module or f"attn_{side}")
        bias = tapped.bias if module is None else None
        self.bias = None if bias is None else bias.detach()
        self.width = stream.spec.kv_width
        self.output: Tensor | None = None
        tapped.register_forward_hook(self._note)

    def _note(self, module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.output = output

    def seen(self) -> Tensor:
        """The module's output."""
        assert self.output is not None
        return self.output

    def flat(self, x: Tensor) -> Tensor:
        """Something of the output's shape as [window, w]."""
        return x.detach().reshape(-1, self.width)

    def values(self) -> Tensor:
        """[window, w] without bias."""
        rows = self.flat(self.seen())
        return rows if self.bias is None else rows - self.bias


class Meter:
    """Adds up the moments of one kind of row and keeps some of the rows."""

    def __init__(self, stream: LayerStream, n_windows: int, sink: int) -> None:
        width = stream.spec.kv_width
        self.n_kv, self.sink, self.count = stream.spec.n_kv, sink, 0
        available = n_windows * (int(stream.tokens.shape[1]) - sink)
        self.stride = max(1, available // N_ROWS)
        self.moment = torch.zeros(width, width, dtype=torch.float64, device=stream.device)
        self.weighted, self.fisher = torch.zeros_like(self.moment), torch.zeros_like(self.moment)
        self.mean = torch.zeros(width, dtype=torch.float64, device=stream.device)
        self.weighted_mean = torch.zeros_like(self.mean)
        self.total = torch.zeros(self.n_kv, dtype=torch.float64, device=stream.device)
        self.rows: list[Tensor] = []
        self.energies: list[Tensor] = []

    def add(self, values: Tensor, slopes: Tensor) -> None:
        """Both [window, w]."""
        values, slopes = values[self.sink :].double(), slopes[self.sink :].double()
        energy = slopes.square().unflatten(1, (self.n_kv, -1)).sum(2)
        heavy = values * energy.sum(1, keepdim=True)
        self.moment.addmm_(values.T, values)
        self.weighted.addmm_(values.T, heavy)
        self.fisher.addmm_(slopes.T, slopes)
        self.mean += values.sum(0)
        self.weighted_mean += heavy.sum(0)
        self.total += energy.sum(0)
        first = -self.count % self.stride
        self.rows.append(values[first :: self.stride].float().cpu())
        self.energies.append(energy[first :: self.stride].cpu())
        self.count += values.shape[0]

    def result(self, name: str) -> dict[str, Array]:
        tiny = torch.finfo(torch.float64).tiny
        total, per_head = self.total.sum().clamp_min(tiny), (self.total / self.count).clamp_min(tiny).cpu()
        arrays = {
            "moment": self.moment / self.count,
            "weighted": self.weighted / total,
            "fisher": self.fisher / self.count,
            "mean": self.mean / self.count,
            "weighted_mean": self.weighted_mean / total,
            "rows": torch.cat(self.rows),
            "energy": (torch.cat(self.energies) / per_head).float(),
        }
        return {f"{name}_{key}": array.cpu().numpy() for key, array in arrays.items()}


def _backward(
    stream: LayerStream,
    index: int,
    inputs: Tensor,
    above: Tensor,
    below: Tensor,
    sink: int,
    recent: int,
    bar: Any,
) -> dict[str, Array]:
    """Measures one layer; above, below: gradients of its output and input."""
    n_kv, norm = stream.spec.n_kv, norm_module(stream.spec, "k")
    with stream.layer(index, index - 1) as live:
        taps = {side: Tap(stream, live, side) for side in SIDES}
        if norm is not None:
            taps["normed"] = Tap(stream, live, "k", norm)
        meters = {name: Meter(stream, len(inputs), sink) for name in taps}
        for row in range(len(inputs)):
            bottom = inputs[row : row + 1].clone().requires_grad_()
            with TwoCopies(n_kv, sink, recent) as copies:
                attended = live.attended(bottom, stream.positions)
            key, _ = copies.found()
            past, through = live.fed_slope(bottom, attended, above[row : row + 1])
            (down,) = torch.autograd.grad(attended, bottom, through, retain_graph=True)
            below[row] = (down + past)[0]
            slopes = as_projected(taps, key, *copies.slopes())
            for name, meter in meters.items():
                meter.add(taps[name].values(), slopes[name])
            bar.update(1)
        return {key: array for name, meter in meters.items() for key, array in meter.result(name).items()}


def as_projected(
    taps: dict[str, Tap], key: Tensor, key_slope: Tensor, value_slope: Tensor
) -> dict[str, Tensor]:
    """Gradients [1, n_kv, T, head_dim] of what attention reads, as [T, w] of what every tap saw: of k back
    through RoPE (and a norm)."""
    n_kv = key_slope.shape[1]
    after = torch.zeros_like(key)
    after[:, :: key.shape[1] // n_kv] = key_slope
    names = [name for name in taps if name != "v"]
    before = torch.autograd.grad(key, [taps[name].seen() for name in names], after, retain_graph=True)
    slopes = {name: taps[name].flat(slope) for name, slope in zip(names, before, strict=True)}
    slopes["v"] = value_slope[0].transpose(0, 1).reshape(key.shape[2], -1)
    return slopes
