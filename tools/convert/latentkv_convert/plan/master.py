"""What a master file holds beside its plan (docs/gguf.md)."""

from __future__ import annotations

import numpy as np

from latentkv.plan.allocation import least

from ..ir import F64, SIDES, Forecast, Master, ModelSpec
from . import allotment
from .allotment import DROP_PENALTY, Allotment, Terms
from .candidates import Shape
from .forecast import Check

# Compressed bytes at which a master is measured, in its own: from 8 % to 28 % of f16 at the default.
MEASURED = (0.5, 1.0, 2.2)
_FLOOR = 1e-12  # nats: divergences of nothing, to take the logarithm of


def of(
    spec: ModelSpec, shape: Shape, own: Allotment, terms: Terms, context: int, check: Check, seen: Forecast
) -> Master:
    """What the formats of `own` were chosen from, and plans around it, measured to forecast others. seen: its
    own forecast; context: tokens at which a share of f16 is counted.

    Noise of the measurement must not make a plan of more distortion the better one.
    """
    cut, points = own.cut, {}
    fewest = least(cut.groups) + min(terms.count.exact.values())
    for multiple in MEASURED:
        bought = allotment.within(cut, terms, max(terms.multiple(multiple, own.exact), fewest))
        x = bought.distortion(DROP_PENALTY)
        its = seen if multiple == 1 else check.measured(bought.plan(shape, spec), x)
        points[x] = its.kld - terms.prices[bought.exact]
    rows = iter(group[0].distortion for group in cut.groups)
    by_side: dict[str, list[F64]] = {side: [] for side in SIDES}
    for layer in spec.row_layers:
        for side in SIDES:
            n_groups = spec.at(layer).n_kv // cut.candidate.group(spec, layer, side)
            stored = "v" if spec.mla is not None else side  # a row's turned channels come first
            if side == "v" or not shape.has_one_row(spec, layer):
                by_side[stored] += [next(rows) for _ in range(n_groups)]
    none = np.zeros((0, len(shape.formats)))
    distortions = {side: np.concatenate([none, *tables]) for side, tables in by_side.items()}
    measured = {np.float32(max(x, _FLOOR)): max(points[x], _FLOOR) for x in sorted(points)}
    predicted = np.array(list(measured), dtype=np.float64)
    kld = np.maximum.accumulate(np.array(list(measured.values())))
    return Master(shape.formats, context, DROP_PENALTY, distortions, predicted, kld, terms.prices)
