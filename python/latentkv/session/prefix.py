"""What two token lists begin with, and how much of a cached one another may keep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Window:
    """Latest tokens that the cache keeps out of its compressed region: a count, a share of the tokens, or the
    larger of both."""

    recent: int = 0
    ratio: float = 0.0

    @staticmethod
    def of(regions: Mapping[str, Any], recent: int, ratio: float) -> Window:
        """What was asked for, else (both negative) the file's."""
        if recent < 0 and ratio < 0:
            return Window(regions.get("recent", 0), regions.get("recent_ratio", 0.0))
        return Window(max(0, recent), max(0.0, ratio))

    def __str__(self) -> str:
        share = f"{100 * self.ratio:.4g} %" if self.ratio else ""
        return " or ".join(filter(None, (str(self.recent) if self.recent or not share else "", share)))

    def tokens(self, count: int) -> int:
        """Of `count` cached tokens."""
        # files hold the ratio in f32: 0.1 of 100 tokens are 10, not 11
        return max(self.recent, math.ceil((self.ratio - 1e-7) * count))


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with.

    >>> common([1, 2, 3], [1, 2, 4, 5])
    2
    """
    low, high = 0, min(len(a), len(b))  # equal below low; unequal somewhere below high + 1, if anywhere
    if a[:high] == b[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def kept(cached: Sequence[int], prompt: Sequence[int], window: Window, rewinds: bool) -> int:
    """How many of the cached tokens a prompt can go on from.

    At most all but one of the prompt's: logits come from computing the last. Where the latest tokens have a
    region of their own, a rewind also forgets as many as that: they were compressed when others followed
    them, and are computed anew. Without `rewinds` a rewind forgets all (Session.rewinds).
    """
    keep = min(common(cached, prompt), len(prompt) - 1)
    if keep == len(cached) or (rewinds and len(cached) <= window.tokens(len(cached))):  # all still exact
        return keep
    return max(0, keep - window.tokens(keep)) if rewinds else 0
