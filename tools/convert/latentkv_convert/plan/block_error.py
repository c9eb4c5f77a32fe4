"""The error that low-rank K and V cause in the output of a decoder layer, measured by running the layer.

Every layer reads the original hidden states, so errors do not accumulate (Eigen Attention, section 4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ..calibrate.decoder import linear
from ..calibrate.normed import NormedLinear
from ..calibrate.sensitivity import relative
from ..calibrate.stream import LayerStream
from ..compute import floats
from ..errors import ConvertError
from ..fuse import center
from ..ir import F32, F64, SIDES, Basis
from ..work import Work

Ranks = Mapping[str, Sequence[int]]  # side -> rank per group


def measure(
    work: Work, trials: Sequence[Sequence[Ranks]], n_tokens: int, *, per_token: bool
) -> list[list[float]]:
    """Relative error of every trial's block output, per layer that attends, on the sample's first n_tokens.

    Raises:
        ConvertError: no calibration sample, or activations that are not finite.
    """
    if work.sample is None:
        raise ConvertError("--calib", "a text file to measure block outputs on", "none")
    tokens = work.sample.tokens
    window = min(tokens.shape[1], n_tokens)
    tokens = tokens[: max(1, n_tokens // window), :window]
    stream = LayerStream(work.source, tokens, work.device, "block errors")
    errors: list[list[float]] = []
    left = iter(trials)
    with torch.no_grad():
        hidden = stream.embed()
        for index in range(work.spec.n_layer):
            with stream.layer(index) as live:
                exact = torch.cat([stream.run(live, index, each[None]).cpu() for each in hidden])
                if not work.spec.attends(index):
                    hidden = exact
                    continue
                row = []
                for ranks in next(left):
                    for side in SIDES:
                        _replace(work, live, index, side, ranks[side])
                    out = torch.cat([stream.run(live, index, each[None]).cpu() for each in hidden])
                    row.append(relative(out, exact, per_token=per_token))
                errors.append(row)
            hidden = exact
    return errors


def product(work: Work, layer: int, side: str, ranks: Sequence[int]) -> F32:
    """[w, d]: the projection that a layer's truncated factors stand for."""
    weight = work.weight(layer, side).astype(np.float64)
    parts, begin = [], 0
    for basis, rank in zip(_bases(work, layer, side, ranks), ranks, strict=True):
        cut = basis.truncated(rank)
        width = cut.down.shape[0]
        parts.append(cut.up.T @ (cut.down.T @ weight[begin : begin + width]))
        begin += width
    return np.concatenate(parts).astype(np.float32)


def _bases(work: Work, layer: int, side: str, ranks: Sequence[int]) -> tuple[Basis, ...]:
    return work.bases(layer, side, work.spec.n_kv // len(ranks))


def bias(work: Work, layer: int, side: str, ranks: Sequence[int]) -> F32 | None:
    """[w] beside `product`: the projection's own, and mu - P mu, what the factors cut of the mean."""
    own, mu = work.bias(layer, side), center.mean(work, layer, side)
    if mu is None:
        return own
    parts = np.split(mu, len(ranks))
    pairs = zip(_bases(work, layer, side, ranks), ranks, strict=True)
    cuts = [basis.truncated(rank) for basis, rank in pairs]
    lost = np.concatenate([x - (x @ cut.down) @ cut.up for x, cut in zip(parts, cuts, strict=True)])
    return (lost if own is None else lost + own).astype(np.float32)


def projector(work: Work, layer: int, side: str, ranks: Sequence[int]) -> F64:
    """[w, w] from a projection's output, a column, to what the truncated factors leave of it."""
    parts, begin = np.zeros((work.spec.kv_width, work.spec.kv_width)), 0
    for basis, rank in zip(_bases(work, layer, side, ranks), ranks, strict=True):
        cut, width = basis.truncated(rank), basis.down.shape[0]
        parts[begin : begin + width, begin : begin + width] = cut.up.T @ cut.down.T
        begin += width
    return parts


def _replace(work: Work, live: nn.Module, layer: int, side: str, ranks: Sequence[int]) -> None:
    module: Any = live.get_submodule(f"attn_{side}")
    if isinstance(module, NormedLinear):
        matrix, lost = projector(work, layer, side, ranks), bias(work, layer, side, ranks)
        shift = None if lost is None else floats.tensor(lost, work.device)
        module.after = linear(floats.tensor(matrix.astype(np.float32), work.device), shift)
        return
    module.weight.copy_(torch.from_numpy(product(work, layer, side, ranks)))
    added = bias(work, layer, side, ranks)
    if added is None:
        return
    if module.bias is None:
        module.bias = nn.Parameter(torch.empty_like(module.weight[:, 0]), requires_grad=False)
    module.bias.copy_(torch.from_numpy(added))
