"""`--kv-budget`: bytes of a whole cache, sinks and recent tokens included, as the runtime allocates them."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

from . import rows
from .errors import ConvertError
from .ir import ModelSpec

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SHARE = re.compile(r"(\d+(?:\.\d+)?)%")
_BYTES = re.compile(r"(\d+(?:\.\d+)?)(B|KiB|MiB|GiB|TiB)?@(\d+)")


@dataclass(frozen=True)
class Budget:
    text: str
    share: float | None = None  # of the f16 cache at the served context
    size: int = 0  # bytes, at n_ctx
    n_ctx: int = 0

    def __str__(self) -> str:
        return self.text

    def per_token(self, spec: ModelSpec, served: int, sink: int, recent: int) -> int:
        """Bytes for a token's compressed rows in all layers. served: the context at which a share is counted.

        Raises:
            ConvertError: the exact tokens alone take the budget.
        """
        n_ctx = served if self.share is not None else self.n_ctx
        total = self.size if self.share is None else int(self.share * rows.full_cache_bytes(spec, n_ctx))
        n_slots, n_exact = rows.round_up(n_ctx, rows.SLOT_TILE), sum(rows.region_slots(n_ctx, sink, recent))
        fixed = n_exact * rows.full_bytes_per_token(spec) + (n_exact + n_slots) * rows.CELL_BYTES
        if total <= fixed:
            raise ConvertError(
                "--kv-budget",
                f"more than {fixed} bytes ({n_exact} exact slots and bookkeeping at {n_ctx} tokens)",
                f"{total} bytes",
                "raise it, or lower --recent or --sink",
            )
        return (total - fixed) // n_slots


def parse(text: str) -> Budget:
    """argparse type: `14%` of the f16 cache, or `2.5GiB@131072`, bytes at a context."""
    if match := _SHARE.fullmatch(text):
        share = float(match[1]) / 100
        if share > 0:
            return Budget(text, share)
    elif match := _BYTES.fullmatch(text):
        size, n_ctx = int(float(match[1]) * _UNITS[match[2] or ""]), int(match[3])
        if size > 0 and n_ctx > 0:
            return Budget(text, None, size, n_ctx)
    raise argparse.ArgumentTypeError(f"a share as 14%, or bytes at a context as 2.5GiB@131072; got {text}")
