"""What a master file holds beside its plan (docs/gguf.md)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..ir import F64, Master

_FLOOR = 1e-12  # nats: divergences of nothing, to take the logarithm of


def of(
    formats: tuple[str, ...],
    context: int,
    drop_penalty: float,
    distortions: Mapping[str, F64],
    points: Mapping[float, float],
    prices: Mapping[str, float],
) -> Master:
    """points: summed distortion of measured plans -> nats per token, without what exact tokens cost. Noise of
    the measurement must not make a plan of more distortion the better one. prices: of exact tokens."""
    measured = {np.float32(max(x, _FLOOR)): max(points[x], _FLOOR) for x in sorted(points)}
    predicted = np.array(list(measured), dtype=np.float64)
    kld = np.maximum.accumulate(np.array(list(measured.values())))
    return Master(formats, context, drop_penalty, distortions, predicted, kld, prices)
