"""What two token lists begin with, and how much of a cached one another may keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """The number of tokens that both lists begin with.

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


def kept(cached: Sequence[int], prompt: Sequence[int], n_recent: Callable[[int], int], rewinds: bool) -> int:
    """How many of the cached tokens a prompt can go on from. n_recent: Session's.

    At most all but one of the prompt's: logits come from computing the last. Where the latest tokens have a
    region of their own, a rewind also forgets as many as that: they were compressed when others followed
    them, and are computed anew. Without `rewinds` a rewind forgets all (Session.rewinds).
    """
    keep = min(common(cached, prompt), len(prompt) - 1)
    if keep == len(cached) or (rewinds and len(cached) <= n_recent(len(cached))):  # all still exact
        return keep
    return max(0, keep - n_recent(keep)) if rewinds else 0
