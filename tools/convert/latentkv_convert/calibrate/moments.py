"""Second moments of the K and V projections' outputs before bias (after a norm over all heads): M = (1/T) Σ
xᵀx, [w, w] float64, BOS included."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from ..errors import warn
from ..ir import SIDES, Array, ModelSpec
from ..recipe import Recipe
from .decoder import Layer
from .stream import NOTHING, LayerStream, Seen, added

VERSION = 2


def sample(recipe: Recipe) -> tuple[int, int]:
    return recipe.calib_tokens, recipe.calib_window


def n_bytes(spec: ModelSpec) -> int:
    return 2 * 8 * sum(spec.at(layer).kv_width ** 2 for layer in spec.attention_layers)


def collect(stream: LayerStream) -> Iterator[tuple[int, Mapping[str, Array]]]:
    """Per layer that attends: k, v [w, w] second moments and k_mean, v_mean [w], without the projection's
    bias."""
    width = max(stream.spec.at(layer).kv_width for layer in stream.spec.attention_layers)
    if stream.tokens.numel() < 4 * width:
        expected = f"at least {4 * width} tokens for {width} outputs"
        warn("--calib", expected, f"{stream.tokens.numel()}", "the tail of the spectrum is noise")
    yield from means(
        stream,
        lambda index, live: partial(_sums, {side: getattr(live, f"attn_{side}").bias for side in SIDES}),
    )


def means(
    stream: LayerStream, measure: Callable[[int, Layer], Callable[[int, Seen], dict[str, Tensor]]]
) -> Iterator[tuple[int, Mapping[str, Array]]]:
    """What is kept of every layer: the sums per token that measure(layer, weights)(window, seen) makes, or
    NOTHING where the layer does not attend."""
    with torch.no_grad(), stream.bar() as bar:
        for index, hidden, output in stream.forward():
            total: dict[str, Tensor] = {}
            with stream.layer(index) as live:
                if stream.spec.attends(index):
                    for found in stream.passed(live, index, hidden, output, bar, measure(index, live)):
                        added(total, found)
                else:
                    stream.advance(live, index, hidden, output, bar)
            n_tokens = output[..., 0].numel()
            yield index, {name: (sums / n_tokens).cpu().numpy() for name, sums in total.items()} or NOTHING


def _sums(biases: Mapping[str, Tensor | None], window: int, seen: Seen) -> dict[str, Tensor]:
    """Over one window's tokens."""
    sums: dict[str, Tensor] = {}
    for side, bias in biases.items():
        rows = seen[side][0] if bias is None else seen[side][0] - bias
        flat = rows.double()
        sums |= {side: flat.T @ flat, f"{side}_mean": flat.sum(0)}
    return sums
