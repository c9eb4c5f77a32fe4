"""What the same error in many tokens costs.

Fisher moments take errors of different tokens as independent. Errors of rounding are, nearly; what a dropped
coordinate takes from a row is not: in layer 0 of Qwen2.5-Coder-1.5B, whose keys have biases of up to 354,
that is much the same in every token, and so is what it does to every score. With c the gradient of a window's
log-likelihood ratios (calibrate/head.py) by the share of a coordinate that is dropped from all tokens,
½ E[c²] is what dropping it costs. In SmolLM2-135M that is 0.1 to 200 times as much as for independent errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from latentkv.plan.allocation import Table

from ..fuse import center, energy
from ..ir import F64, SIDES, ModelSpec
from ..rows import served
from ..source.frequencies import frequencies
from ..work import Work
from .allotment import DROP_PENALTY
from .candidates import Candidate, Shape, cut, places

PRIOR = 1.0  # windows' worth of DROP_PENALTY times the independent cost, which what is measured is drawn to
Pulls = Mapping[tuple[int, str], F64]  # by layer and side: [windows, channels of all groups], a token's share


def pulls(work: Work, shape: Shape, candidate: Candidate) -> Pulls:
    """Of the windows whose rows were paired with gradients (calibrate/copies.py), each at a position of its
    own up to the served context."""
    assert work.sample is not None
    window, found = work.sample.tokens.shape[1], {}
    for layer in work.spec.row_layers:
        for side in SIDES:
            own, group = work.spec.at(layer).of_side(side), candidate.group(work.spec, layer, side)
            crosses = _crosses(work, shape, layer, side, window)
            width, parts = group * own.head_dim, []
            for at, basis in enumerate(work.bases(layer, side, group)):
                block = slice(at * width, (at + 1) * width)
                parts.append(((basis.down.T @ crosses[:, block, block]) * basis.up).sum(-1))
            found[layer, side] = np.concatenate(parts, axis=1) / window**0.5
    return found


def _crosses(work: Work, shape: Shape, layer: int, side: str, window: int) -> F64:
    """[windows, w, w]: Σ x gᵀ of the rows x as they are cached."""
    path = shape.paths[side]
    name = "turned" if path == "rotated" else side
    stats = work.stats["copies"][layer]
    crosses, sums = (stats[f"{name}_{of}"].astype(np.float64) for of in ("cross", "pull"))
    if center.centred(work, layer, side, path):
        mean = center.mean(work, layer, side)
        assert mean is not None
        crosses = crosses - mean[None, :, None] * sums[:, None, :]
    if path != "rotated" or shape.context is None:
        return crosses
    freqs, head_dim = frequencies(work.spec, shape.context, layer), work.spec.at(layer).head_dim
    rng = np.random.default_rng([work.seed, layer, len(crosses)])
    begins = rng.integers(0, max(0, shape.context - window) + 1, len(crosses))

    def turned(rows: F64, begin: int) -> F64:
        at = np.full(len(rows), float(begin))
        return served.rows_after_rope(rows.astype(np.float32), freqs, head_dim, at).astype(np.float64)

    return np.stack([turned(turned(cross, at).T, at).T for cross, at in zip(crosses, begins, strict=True)])


def counted(candidate: Candidate, shape: Shape, spec: ModelSpec, found: Pulls) -> Candidate:
    """The candidate with what errors that are alike in many tokens cost in its distortions: of dropped
    segments, and of the part of a segment that levels take from every token."""
    tables = list(candidate.tables)
    for (layer, side), where in places(candidate, shape, spec).items():
        width = candidate.group(spec, layer, side) * spec.at(layer).of_side(side).head_dim
        for at, index in enumerate(where):
            own = found[layer, side][:, at * width : (at + 1) * width]
            pairs = zip(tables[index], shape.widths, strict=True)
            tables[index] = tuple(_counted(table, own, cut(width, each), shape) for table, each in pairs)
    return replace(candidate, tables=tables)


def _counted(table: Table, pulled: F64, widths: Sequence[int], shape: Shape) -> Table:
    """pulled [windows, channels] of the group."""
    begins = np.cumsum((0, *widths[:-1]))
    # Coordinates are uncorrelated: their costs add up. The square of a segment's own gradient is the same on
    # the mean, but its logarithm spreads three times as much.
    measured = 0.5 * np.add.reduceat(pulled**2, begins, axis=1)  # nats of every segment, by window
    alone = table.distortion[:, -1]
    together = (measured.sum(0) + PRIOR * DROP_PENALTY * alone) / (len(measured) + PRIOR)
    taken = np.array([energy.taken(name, shape.regains) for name in shape.formats])
    distortion = table.distortion + taken**2 * np.maximum(together - alone, 0)[:, None]
    distortion[:, -1] = np.maximum(together, alone) / DROP_PENALTY  # it is counted so many times
    # as a master file holds them: the same plan there
    return replace(table, distortion=distortion.astype(np.float32).astype(np.float64))
