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

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import ConvertError
from ..ir import SIDES, Array, ModelSpec
from ..recipe import Recipe
from . import head
from .mixers import mla
from .stream import NOTHING, LayerStream, added, noting
from .two_copies import TwoCopies

VERSION = 8
N_ROWS = 2048  # real rows kept per layer and side, to measure quantizers on
PULLED = (4, 16)  # windows whose rows are multiplied with their gradients, of wide and of narrow rows
_CROSSES = 1 << 20  # numbers of a layer's products, beyond the fewest windows'
# A token's |g|² counts up to so many times the mean of its window. A few tokens that every query reads have a
# thousand times as much, and each is one random direction: without a limit F is noise of them.
LIMIT = 20.0


def sample(recipe: Recipe) -> tuple[int, int]:
    return recipe.fisher_tokens, recipe.calib_window


def settings(recipe: Recipe) -> dict[str, int]:
    """What else the numbers depend on."""
    return {"sink": recipe.options["sink"], "recent": recipe.options["recent"], "seed": recipe.seed}


def n_bytes(spec: ModelSpec) -> int:
    widths = [spec.at(layer).kv_width for layer in spec.row_layers]
    return 3 * sum(w * (3 * 8 * w + 4 * n_pulled(w) * w + 4 * N_ROWS * 2) for w in widths)


def n_pulled(width: int) -> int:
    """Windows whose rows of this width are multiplied with their gradients: as many as there is room for."""
    return min(max(_CROSSES // width**2, PULLED[0]), PULLED[1])


def split(n_windows: int) -> tuple[list[int], list[int]]:
    """Windows that are measured, and the eighth (at least one, of two or more) that is held back to check a
    plan on."""
    held = list(range(n_windows))[-1::-8] if n_windows > 1 else []
    return [window for window in range(n_windows) if window not in held], sorted(held)


def collect(
    stream: LayerStream, sink: int, recent: int, seed: int
) -> Iterator[tuple[int, Mapping[str, Array]]]:
    """Per layer that attends, over tokens past the sinks, for each of

    k, v: the projection's output without its bias;
    normed: k after its per-head norm, where there is one;
    one: v where the key projection makes it, with the gradients of both, if keys are made of its rows:

    *_moment, *_weighted, *_fisher [w, w] float64, E[x xᵀ], the same over tokens weighted by |g|², and E[g
    gᵀ]; *_mean, *_weighted_mean [w]; *_rows [n, w] float32, evenly spaced real rows, and *_energy [n, n_kv]
    float32, |g|² per KV head of those rows over its mean over all tokens.

    And of the first n_pulled windows, for k, v and turned, a key as it meets queries (not with MLA): *_cross
    [windows, w, w] float32, Σ x gᵀ over all tokens, and *_pull [windows, w], Σ g.
    """
    check_window(stream, sink, recent)
    windows, _ = split(stream.n_windows)

    def slope(row: int, hidden: Tensor) -> Tensor:
        generator = torch.Generator(stream.device).manual_seed(seed + 1_000_003 * row)
        return head.drawn_slope(stream, hidden, generator)

    with stream.bar(n_windows=len(windows)) as bar, torch.no_grad():
        for index, hidden, output in stream.forward(windows, keep=True):
            with stream.layer(index, index + 1) as live:
                stream.advance(live, index, hidden, output, bar)
    with stream.bar_back(len(windows)) as bar:
        for index, inputs, above, below in stream.backward(slope, bar):
            if stream.spec.makes_rows(index):
                yield index, _backward(stream, index, inputs, above, below, sink, recent, bar)
                continue
            reading = _reading_carried(stream, index, sink, recent)
            with stream.layer(index, index - 1) as live:
                stream.descend(live, index, inputs, above, below, bar, reading)
            yield index, NOTHING


def _reading_carried(
    stream: LayerStream, index: int, sink: int, recent: int
) -> Callable[[Tensor], contextlib.AbstractContextManager[Any]]:
    """For a layer that reads another's K and V, so that gradients by old rows are apart."""
    spec, carried = stream.spec, stream.ends.carried
    if carried is None or not spec.at(index).shares_kv:
        return contextlib.nullcontext

    def reading(bottom: Tensor) -> TwoCopies:
        _, old = carried.rows(bottom, spec.rows_of(index))
        return TwoCopies(spec.at(index).n_kv, sink, recent, old, reduced=stream.reduced)

    return reading


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


class Meter:
    """Adds up the moments of one kind of row and keeps some of the rows."""

    def __init__(self, spec: ModelSpec, n_windows: int, window: int, sink: int) -> None:
        self.n_kv, self.sink, self.n = spec.n_kv, sink, window - sink
        self.count = n_windows * self.n
        self.stride = max(1, self.count // N_ROWS)
        self.total: dict[str, Tensor] = {}
        self.rows: list[Tensor] = []
        self.energies: list[Tensor] = []

    def sums(self, values: Tensor, slopes: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Takes one window, both [window, w]. Returns sums over the tokens past the sinks, the rows of these
        tokens, and their |g|² per KV head."""
        values, slopes = values[self.sink :].double(), limited(slopes[self.sink :].double())
        energy = slopes.square().unflatten(1, (self.n_kv, -1)).sum(2)
        heavy = values * energy.sum(1, keepdim=True)
        sums = {
            "moment": values.T @ values,
            "weighted": values.T @ heavy,
            "fisher": slopes.T @ slopes,
            "mean": values.sum(0),
            "weighted_mean": heavy.sum(0),
            "energy": energy.sum(0),
        }
        return sums, values, energy

    def chosen(self, window: int) -> slice:
        """The tokens of a window whose rows are kept."""
        return slice(-window * self.n % self.stride, None, self.stride)

    def add(self, sums: dict[str, Tensor], rows: Tensor, energies: Tensor) -> None:
        """Adds the next window."""
        added(self.total, sums)
        self.rows.append(rows)
        self.energies.append(energies)

    def result(self, name: str) -> dict[str, Array]:
        tiny = torch.finfo(torch.float64).tiny
        energy = self.total.pop("energy")
        whole, per_head = energy.sum().clamp_min(tiny), (energy / self.count).clamp_min(tiny).cpu()
        per = {key: whole if key.startswith("weighted") else self.count for key in self.total}
        arrays = {
            **{key: sums / per[key] for key, sums in self.total.items()},
            "rows": torch.cat(self.rows),
            "energy": (torch.cat(self.energies) / per_head).float(),
        }
        return {f"{name}_{key}": array.cpu().numpy() for key, array in arrays.items()}


def limited(slopes: Tensor) -> Tensor:
    """slopes [tokens, w] with no row of more than LIMIT times the mean square."""
    energy = slopes.square().sum(1, keepdim=True)
    tiny = torch.finfo(slopes.dtype).tiny
    return slopes * (LIMIT * energy.mean() / energy.clamp_min(tiny)).clamp_max(1).sqrt()


def crossed(values: Tensor, slopes: Tensor) -> dict[str, Tensor]:
    """Of one window, both [window, w]. The sum of x·d and g·u over tokens is dᵀ (Σ x gᵀ) u."""
    return {"cross": values.T @ slopes, "pull": slopes.sum(0)}


Found = tuple[dict[str, tuple[dict[str, Tensor], Tensor, Tensor]], dict[str, dict[str, Tensor]]]


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
    spec, window, carried = stream.spec.at(index), inputs.shape[1], stream.ends.carried
    with stream.layer(index, index - 1) as live:
        has_norm = spec.mla is None and hasattr(live, "attn_k_norm")
        names = {"k": "k", "v": "v"} | ({"normed": "k_norm"} if has_norm else {})
        meets = {**names, "one": "v"} if spec.value_of_key and "normed" in names else names
        meters = {name: Meter(spec, len(inputs), window, sink) for name in meets}
        biases = {side: getattr(live, f"attn_{side}").bias for side in SIDES if spec.mla is None}

        def step(row: int) -> Found:
            bottom, seen = inputs[row : row + 1].clone().requires_grad_(), dict[str, Tensor]()
            with TwoCopies(spec.n_kv, sink, recent, reduced=stream.reduced) as copies:
                attended = live.attended(bottom, stream.positions, noting(seen))
            past, through = live.fed_slope(bottom, attended, above[row : row + 1])
            (down,) = torch.autograd.grad(attended, bottom, through, retain_graph=True)
            below[row] = (down + past)[0]
            rows = {name: seen[of] for name, of in names.items()}
            own = as_projected if spec.mla is None else mla.as_made
            key_slope, value_slope = copies.slopes()
            if carried is not None and index in carried.heads:  # later layers read them too
                _, of_readers = carried.rows(above[row : row + 1], index)
                key_slope, value_slope = key_slope + of_readers[0], value_slope + of_readers[1]
            key, value = copies.found()
            slopes = own(rows, key, value, key_slope, value_slope)
            if "one" in meets:  # the normed key is V times the norm's weights
                rows["one"] = rows["v"]
                slopes["one"] = slopes["v"] + slopes["normed"] * live.attn_k_norm.weight.repeat(spec.n_kv)
            found, pulls = {}, {}
            if spec.mla is None and row < n_pulled(spec.kv_width):
                every = key.shape[1] // spec.n_kv
                turned = (x[0].transpose(0, 1).flatten(1) for x in (key.detach()[:, ::every], key_slope))
                pulls["turned"] = crossed(*turned)
            for name, meter in meters.items():
                bias = biases.get(name)
                values = rows[name].detach().reshape(window, -1)
                values = values if bias is None else values - bias
                if name in SIDES and pulls:
                    pulls[name] = crossed(values, slopes[name])
                sums, values, energy = meter.sums(values, slopes[name])
                kept = meter.chosen(row)
                found[name] = sums, values[kept].float().cpu(), energy[kept].cpu()
            return found, {name: {of: x.cpu() for of, x in pull.items()} for name, pull in pulls.items()}

        pulled: list[dict[str, dict[str, Tensor]]] = []
        for found, pulls in stream.each(step, len(inputs)):
            for name, meter in meters.items():
                meter.add(*found[name])
            pulled += [pulls] if pulls else []
            bar.update(1)
    arrays = {key: array for name, meter in meters.items() for key, array in meter.result(name).items()}
    for name in pulled[0] if pulled else ():
        for of in ("cross", "pull"):
            arrays[f"{name}_{of}"] = torch.stack([pulls[name][of] for pulls in pulled]).numpy()
    return arrays


def as_projected(
    rows: Mapping[str, Tensor], key: Tensor, value: Tensor, key_slope: Tensor, value_slope: Tensor
) -> dict[str, Tensor]:
    """Gradients [1, n_kv, T, head_dim] of what attention reads, as [T, w] of the rows of every name: those of
    k go back through RoPE (and a norm)."""
    n_kv = key_slope.shape[1]
    after = torch.zeros_like(key)
    after[:, :: key.shape[1] // n_kv] = key_slope
    names = [name for name in rows if name != "v"]
    before = torch.autograd.grad(key, [rows[name] for name in names], after, retain_graph=True)
    slopes = {name: slope.reshape(key.shape[2], -1) for name, slope in zip(names, before, strict=True)}
    slopes["v"] = value_slope[0].transpose(0, 1).reshape(key.shape[2], -1)
    return slopes
