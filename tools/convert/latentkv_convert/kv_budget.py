"""`--kv-budget` of a conversion. Its meaning and its allocation are the runtime's, which plans a master file
when it is opened."""

from __future__ import annotations

import argparse

from latentkv import kv_budget
from latentkv.allocation import Choice, Group, Table, allocate, least, total
from latentkv.kv_budget import KvBudget

from . import rows
from .ir import ModelSpec

__all__ = ["Choice", "Group", "KvBudget", "Table", "allocate", "least", "parse", "per_token", "total"]


def parse(text: str) -> KvBudget:
    """argparse type: `14%` of the f16 cache, or `2.5GiB@131072`, bytes at a context."""
    try:
        return kv_budget.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).partition(" expected ")[2]) from None


def per_token(budget: KvBudget, spec: ModelSpec, served: int, sink: int, recent: int) -> int:
    """Bytes for a token's compressed rows in all layers. served: the context at which a share is counted.

    Raises:
        LatentKVError: the exact tokens alone take the budget.
    """
    n_ctx = budget.context(served)
    n_slots, n_exact = rows.round_up(n_ctx, rows.SLOT_TILE), sum(rows.region_slots(n_ctx, sink, recent))
    fixed = n_exact * rows.full_bytes_per_token(spec) + (n_exact + n_slots) * rows.CELL_BYTES
    return budget.row_bytes(rows.full_cache_bytes(spec, n_ctx), fixed, n_exact, n_slots)
