"""A text whose earlier passages can be found again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

SIZES = (
    8,
    3,
)  # tokens of a passage that is looked for, the longest first: a long one is seldom there by chance
LONGEST = 32  # tokens of a match that are counted
_FACTOR = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class Text:
    """Tokens, and where the last of each few of them stand. `end` of a passage: the position after it."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = [int(token) for token in tokens]
        self._ends = tuple(self._indexed(size) for size in SIZES)

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, token: int) -> None:
        """One more token; passages that it ends can be found once another follows."""
        tokens = self.tokens
        for size, ends in zip(SIZES, self._ends, strict=True):
            if len(tokens) >= size:
                ends[_key(tokens[-size:])] = len(tokens)
        tokens.append(token)

    def ends_of(self, tail: Sequence[int]) -> Iterator[int]:
        """Ends of the latest passages like the last few of the tokens in `tail`, those of the longest first;
        some token follows each."""
        for size, ends in zip(SIZES, self._ends, strict=True):
            if len(tail) >= size:
                end = ends.get(_key(tail[-size:]))
                if end is not None and self.tokens[end - size : end] == list(tail[-size:]):
                    yield end

    def matched(self, tail: Sequence[int], end: int) -> int:
        """How many tokens before `end` are those at the end of `tail`, LONGEST at most."""
        count, most = 0, min(len(tail), end, LONGEST)
        while count < most and self.tokens[end - 1 - count] == tail[-1 - count]:
            count += 1
        return count

    def _indexed(self, size: int) -> dict[int, int]:
        """The last end of every passage of so many tokens, without the one that ends the text."""
        count = len(self.tokens) - size
        if count <= 0:
            return {}
        tokens = np.asarray(self.tokens, np.uint64)
        keys = np.zeros(count, np.uint64)
        for at in range(size):  # as _key, wrapping around
            keys = keys * np.uint64(_FACTOR) + tokens[at : at + count] + np.uint64(1)
        return dict(zip(keys.tolist(), range(size, size + count), strict=True))


def _key(tokens: Sequence[int]) -> int:
    """Of two passages seldom the same: who finds one compares its tokens."""
    key = 0
    for token in tokens:
        key = (key * _FACTOR + token + 1) & _MASK
    return key
