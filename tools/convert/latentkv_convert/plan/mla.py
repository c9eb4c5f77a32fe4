"""Multi-head latent attention in a plan: K is the turned channels of a row, in the order of the file and
without a basis of their own, V the latent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from latentkv.plan.allocation import Table

from ..ir import Basis, Mla
from ..source.frequencies import paired_rows

_NEVER = 1e9  # nats


def turned(mla: Mla) -> Basis:
    """From planes (i, i + n_rot/2) to neighbours, and back."""
    order = np.eye(mla.n_rot)[:, paired_rows(1, mla.n_rot, mla.n_rot)]
    return Basis(np.ones(mla.n_rot), order, order.T)


def never_dropped(table: Table) -> Table:
    """Without the last option, `none`: after these channels others follow."""
    cost, distortion = table.cost.copy(), table.distortion.copy()
    cost[:, -1], distortion[:, -1] = cost[:, 0], _NEVER
    return replace(table, cost=cost, distortion=distortion)
