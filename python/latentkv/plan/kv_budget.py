"""`--kv-budget`: bytes of a whole cache, tokens that are kept exact and bookkeeping included."""

from __future__ import annotations

import re
from dataclasses import dataclass

from latentkv.errors import expected

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SHARE = re.compile(r"(\d+(?:\.\d+)?)%")
_BYTES = re.compile(r"(\d+(?:\.\d+)?)(B|KiB|MiB|GiB|TiB)?@(\d+)")


@dataclass(frozen=True)
class KvBudget:
    """`text`: as people write it."""

    text: str
    share: float | None = None  # of the f16 cache
    size: int = 0  # bytes, at n_ctx
    n_ctx: int = 0

    def __str__(self) -> str:
        return self.text

    @staticmethod
    def of_bytes(size: int, n_ctx: int) -> KvBudget:
        """A budget of `size` bytes at a context, rounded down to tenths of a MiB, which its text can say."""
        tenths = 10 * size >> 20
        return KvBudget(f"{tenths / 10}MiB@{n_ctx}", None, int(tenths / 10 * (1 << 20)), n_ctx)

    def context(self, share_context: int) -> int:
        """The context at which the budget is counted: its own, or for a share `share_context`."""
        return self.n_ctx if self.share is None else share_context

    def row_bytes(self, f16_bytes: int, fixed: int, n_exact: int, states: int = 0) -> int:
        """Bytes that are left for the compressed rows of all slots and layers.

        All arguments are at context(). f16_bytes: of the f16 cache. fixed: of `n_exact` exact slots and all
        bookkeeping. states: of recurrent layers; a budget in bytes pays for them, a share of f16 does not.

        Raises:
            LatentKVError: exact tokens and bookkeeping alone exceed the budget.
        """
        total = self.size - states if self.share is None else int(self.share * f16_bytes)
        if total <= fixed:
            counted = f"{n_exact} exact slots and bookkeeping"
            if states and self.share is None:
                total, fixed, counted = self.size, fixed + states, f"{counted}, {states} of recurrent states"
            raise expected(
                "--kv-budget",
                f"more than {fixed} bytes ({counted})",
                f"{total} bytes",
                "raise it, or lower --recent or --sink",
            )
        return total - fixed


def parse(text: str) -> KvBudget:
    """`14%` of the f16 cache, or `2.5GiB@131072`, bytes at a context.

    Raises:
        LatentKVError: anything else.
    """
    if match := _SHARE.fullmatch(text):
        share = float(match[1]) / 100
        if 0 < share <= 1:
            return KvBudget(text, share)
    elif match := _BYTES.fullmatch(text):
        size, n_ctx = int(float(match[1]) * _UNITS[match[2] or ""]), int(match[3])
        if size > 0 and 0 < n_ctx <= 1 << 28:
            return KvBudget(text, None, size, n_ctx)
    raise expected("--kv-budget", "a share such as 14%, or bytes at a context such as 2.5GiB@131072", text)


AUTO = KvBudget("auto")  # to be chosen: as much as fits


def read(given: KvBudget | str | None) -> KvBudget | None:
    """An option's value: None where there is no budget, "" as well.

    Raises:
        LatentKVError: a text that is no budget.
    """
    if given is None or isinstance(given, KvBudget):
        return given
    if not isinstance(given, str):
        raise expected("--kv-budget", 'a text such as "14%"', repr(given))
    if given == AUTO.text:
        return AUTO
    return parse(given) if given else None
