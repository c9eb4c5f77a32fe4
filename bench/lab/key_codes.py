"""How many bits a key needs: codes of single channels, as KVQuant stores K, against the cache's own rows.

    python bench/lab/key_codes.py MODEL.gguf --text val.txt --calib calib.txt

Errors are of scores after RoPE, over all causal pairs of a window that no number was fitted to: |Δs| / |s|,
both without each query's mean, which a softmax does not see. Prints a line a way: bits per channel with all
that it stores, then the error, as a mean and of every layer.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from latentkv_convert.calibrate.sample import encode
from latentkv_convert.calibrate.stream import LayerStream
from latentkv_convert.fuse.rotation import spread
from latentkv_convert.rows.quantizer import stored
from latentkv_convert.rows.sizes import segment_bytes
from latentkv_convert.source.gguf_source import GgufSource

F64 = NDArray[np.float64]
OUTLIERS = 0.01
CUTS = ((32,) * 6, (64,) * 3, (32, 32, 64, 64), (32, 64, 96), (64, 128), (96, 96), (192,))
FORMATS = ("q8", "q6", "q5", "q4", "q3", "q2", "q1", "none")


def projections(
    source: GgufSource, tokens: NDArray[np.int64], layers: list[int]
) -> dict[int, tuple[F64, F64, LayerStream]]:
    """Queries and keys before RoPE of some layers: [windows, window, heads·head_dim]."""
    stream = LayerStream(source, tokens, "cpu", "keys")
    seen: dict[int, tuple[F64, F64, LayerStream]] = {}
    with torch.no_grad():
        for index, hidden, output in stream.forward():
            with stream.layer(index) as live:
                rows = live.attention_input(hidden)
                if index in layers:
                    q, k = (live.get_submodule(f"attn_{side}")(rows).double().numpy() for side in "qk")
                    seen[index] = (q, k, stream)
                output.copy_(live(hidden, stream.positions))
            if index == max(layers):
                break
    return seen


def fit_channel(x: F64, bits: int, even: bool, outliers: float) -> Callable[[F64], F64]:
    """A channel's codes: levels at even distances or where the values are (Lloyd), over all but outliers,
    which stay exact."""
    low, high = np.quantile(x, (outliers / 2, 1 - outliers / 2)) if outliers else (x.min(), x.max())
    inside = x[(x >= low) & (x <= high)]
    levels = np.linspace(low, high, 2**bits)
    if not even:
        levels = np.quantile(inside, (np.arange(2**bits) + 0.5) / 2**bits)
        for _ in range(30):
            owner = np.searchsorted((levels[1:] + levels[:-1]) / 2, inside)
            count = np.bincount(owner, minlength=len(levels))
            levels = np.where(count, np.bincount(owner, inside, len(levels)) / np.maximum(count, 1), levels)
            levels.sort()

    def code(y: F64) -> F64:
        coded: F64 = levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, y)]
        return np.where((y < low) | (y > high), y, coded) if outliers else coded

    return code


def blocks(k: F64, bits: int) -> F64:
    """c8 … c2: scale and minimum of a channel over 32 tokens."""
    tokens = torch.from_numpy(k.reshape(-1, 32, k.shape[1])).float().transpose(1, 2).contiguous()
    return stored(tokens, f"q{bits}").transpose(1, 2).reshape(k.shape).double().numpy()


def latents(calib: F64, weight: F64, budgets: list[float]) -> list[tuple[Callable[[F64], F64], float]]:
    """Rows of latents at no more than so many bits a channel: axes by what they add to scores, the best cut
    and formats."""
    scale = np.sqrt(weight)
    vectors = np.linalg.eigh((calib * scale).T @ (calib * scale))[1][:, ::-1]
    z = calib * scale @ vectors
    best = [(np.inf, 0.0, CUTS[0], ("none",) * len(CUTS[0]))] * len(budgets)
    for widths in CUTS:
        errors = [[_cost(z[:, first : first + w], f) for f in FORMATS] for first, w in _places(widths)]
        for plan in itertools.combinations_with_replacement(range(len(FORMATS)), len(widths)):
            size = (
                sum(segment_bytes(FORMATS[f], w) for f, w in zip(plan, widths, strict=True)) * 8 / z.shape[1]
            )
            error = sum(errors[i][f] for i, f in enumerate(plan))
            for i, budget in enumerate(budgets):
                if size <= budget and error < best[i][0]:
                    best[i] = error, size, widths, tuple(FORMATS[f] for f in plan)

    def code(k: F64, widths: tuple[int, ...], formats: tuple[str, ...]) -> F64:
        rows = k * scale @ vectors
        parts = [
            _segment(rows[:, first : first + w], f)
            for (first, w), f in zip(_places(widths), formats, strict=True)
        ]
        coded: F64 = np.hstack(parts) @ vectors.T / scale
        return coded

    return [(partial(code, widths=widths, formats=formats), size) for _, size, widths, formats in best]


def _places(widths: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip(itertools.accumulate((0, *widths[:-1])), widths, strict=True))


def _segment(x: F64, fmt: str) -> F64:
    turn = spread(x.shape[1])
    coded: F64 = stored(torch.from_numpy(x @ turn.T).float(), fmt).double().numpy() @ turn
    return coded


def _cost(x: F64, fmt: str) -> float:
    return float(np.sum((x - _segment(x, fmt)) ** 2))


class Scores:
    """Of one window: queries [T, heads·head_dim] on keys [T, kv heads·head_dim], both before RoPE."""

    def __init__(self, q: F64, stream: LayerStream, layer: int) -> None:
        self.spec, self.turned = stream.spec, stream.positions.of(layer).turned
        self.q = self._heads(q)
        self.mask = np.tril(np.ones((len(q), len(q)), dtype=bool))

    def _heads(self, rows: F64) -> F64:
        heads = torch.from_numpy(rows).float().unflatten(-1, (-1, self.spec.head_dim)).transpose(0, 1)[None]
        turned: F64 = self.turned(heads)[0].double().numpy()
        return turned

    def of(self, k: F64) -> F64:
        keys = np.repeat(self._heads(k), self.spec.n_head // self.spec.n_kv, axis=0)
        scores: F64 = self.q @ keys.transpose(0, 2, 1)
        mean = np.sum(scores * self.mask, -1, keepdims=True) / self.mask.sum(-1, keepdims=True)
        return (scores - mean) * self.mask


def plane_power(q: F64, head_dim: int, n_kv: int) -> F64:
    """What a key's channel counts in scores: power of the queries in its plane (i, i + head_dim/2), over a KV
    head's queries."""
    power = (q**2).mean(0).reshape(n_kv, -1, 2, head_dim // 2).mean((1, 2))
    return np.repeat(power[:, None], 2, axis=1).reshape(-1)


def ways(q: F64, calib: F64, head_dim: int, n_kv: int) -> dict[str, tuple[float, Callable[[F64], F64]]]:
    """Name -> bits per channel, and what becomes of keys [T, w]."""
    width = calib.shape[1]
    weight = plane_power(q, head_dim, n_kv)
    sparse = OUTLIERS * 24 + 16 / width  # f16 and a byte for the channel; where a token's begin
    found: dict[str, tuple[float, Callable[[F64], F64]]] = {}
    for bits in (3, 4):
        for even, outliers in itertools.product((True, False), (0.0, OUTLIERS)):
            codes = [fit_channel(calib[:, c], bits, even, outliers) for c in range(width)]
            name = f"{bits} bits, {'even' if even else 'uneven'} levels" + (
                ", 1 % outliers" if outliers else ""
            )
            size = bits + (sparse if outliers else 0.0)
            found[name] = (
                size,
                lambda k, codes=codes: np.stack([f(k[:, c]) for c, f in enumerate(codes)], axis=1),
            )
        found[f"c{bits}, before RoPE"] = bits + 1.0, lambda k, bits=bits: blocks(k, bits)
    budgets = sorted(float(bits + more) for bits in (3, 4) for more in (0.0, sparse))
    for budget, (code, size) in zip(budgets, latents(calib, weight, budgets), strict=True):
        found[f"latents, at most {budget:.2f} bits"] = size, code
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--calib", required=True)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 9, 16])
    args = parser.parse_args()
    source = GgufSource(Path(args.model))
    ids = [encode(Path(text).read_text(encoding="utf-8"), source).ids for text in (args.calib, args.text)]
    tokens = np.stack(
        [ids[0][:1024], ids[0][20000:21024], ids[0][40000:41024], ids[0][60000:61024], ids[1][:1024]]
    )
    seen = projections(source, tokens, args.layers)
    total: dict[str, list[tuple[float, float]]] = {}
    for layer, (q, k, stream) in seen.items():
        scores = Scores(q[-1], stream, layer)
        exact = scores.of(k[-1])
        flat_q, flat_k = (x[:-1].reshape(-1, x.shape[-1]) for x in (q, k))
        for name, (size, code) in ways(flat_q, flat_k, stream.spec.head_dim, stream.spec.n_kv).items():
            error = np.linalg.norm(scores.of(code(k[-1])) - exact) / np.linalg.norm(exact)
            total.setdefault(name, []).append((size, float(error)))
    for name, measured in total.items():
        size, error = np.mean(measured, axis=0)
        by_layer = " ".join(f"{100 * of_layer:.1f}" for _, of_layer in measured)
        print(f"{name:40} {size:5.2f} bits  {100 * error:5.1f} %   {by_layer}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
