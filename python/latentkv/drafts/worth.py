"""How many guesses a step is worth.

A step of n tokens takes n**e times as long as one of one token. k guesses of which each is right with
probability a, if those before it were, give E = 1 + a + … + a**k tokens (Leviathan et al. 2023, equation 1).
So many are drafted as give the most tokens for their time, and none where that is not COUNTS_FROM more.
Nothing here asks a clock: the same requests give the same steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from latentkv import _core

COUNTS = (1, 3, 7, 15)  # a graph is built for each length of a step: few lengths, so that it can be kept
MOST = COUNTS[-1]
COUNTS_FROM = 1.05
# of the time that a step of n tokens takes, n**e
CPU, GPU = 0.8, 0.41  # measured, up to 16 tokens: SmolLM2 and a 1.5B on two cores; an 8B on an H200
# matches of so many tokens and more: how often the next token is the source's too, before any was seen
LENGTHS = (1, 4, 8, 16, 32)
LIKELY = (0.5, 0.75, 0.9, 0.96, 0.985)
SEEN = 6.0  # guesses that these count for


def on_gpu(session: _core.Session) -> bool:
    return session.implementations["latent_attn"].startswith("fused cuda")


class Acceptance:
    """How often the token that one sequence's source has comes next, by the length of the match before it.
    It is known of tokens too that were not guessed."""

    def __init__(self) -> None:
        self._right = [SEEN * likely for likely in LIKELY]
        self._tried = [SEEN] * len(LIKELY)

    def rate(self, length: int) -> float:
        at = _class(length)
        return self._right[at] / self._tried[at]

    def add(self, length: int, is_right: bool) -> None:
        at = _class(length)
        self._right[at] += is_right
        self._tried[at] += 1


class Step:
    """The tokens that a step has so far, and those that it is expected to give."""

    def __init__(self, tokens: int, exponent: float) -> None:
        """tokens: of answers, one each."""
        self._tokens = self._given = float(tokens)
        self._exponent = exponent

    def count(self, rate: float, most: int) -> int:
        """How many guesses are worth it, `most` at most, which are then part of the step."""
        count = self.worth(rate, most)
        self.add(count, rate)
        return count

    def worth(self, rate: float, most: int, cost: float = 0.0) -> int:
        """The same of guesses that each cost a share of a step of one token; they are not part of it yet."""
        best, count = self._gain(0, rate, cost) * COUNTS_FROM, 0
        for k in COUNTS:
            if k <= most and (gain := self._gain(k, rate, cost)) > best:
                best, count = gain, k
        return count

    def add(self, count: int, rate: float) -> None:
        """So many guesses are part of the step."""
        self._tokens += count
        self._given += _given(count, rate) - 1

    def _gain(self, k: int, rate: float, cost: float) -> float:
        given = self._given - 1 + _given(k, rate)
        return float(given / ((self._tokens + k) ** self._exponent + k * cost))


def _given(k: int, rate: float) -> float:
    return float(k + 1) if rate >= 1 else (1 - rate ** (k + 1)) / (1 - rate)


def _class(length: int) -> int:
    return sum(length >= least for least in LENGTHS[1:])
