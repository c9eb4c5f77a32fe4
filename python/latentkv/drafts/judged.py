"""How often a model's guesses come true, for who guesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from latentkv.drafts.worth import COUNTS, SEEN

LIKELY = 0.75  # how often the next token is right, before any was seen
LEAST_SURE = 0.5  # a guess that is less likely to its model is its last


@dataclass
class Judged:
    """The guesses of one sequence."""

    guessed: tuple[int, list[int]] = (0, [])  # the latest ones, and behind how many tokens
    right: float = field(default_factory=lambda: SEEN * LIKELY)
    tried: float = SEEN

    @property
    def rate(self) -> float:
        return self.right / self.tried

    def judge(self, tokens: Sequence[int]) -> None:
        """The sequence's tokens by now: which of the latest guesses came true."""
        begin, guessed = self.guessed
        for is_right in map(int.__eq__, guessed, tokens[begin : begin + len(guessed)]):
            self.right += is_right
            self.tried += 1
            if not is_right:
                break
        self.guessed = (0, [])

    def note(self, tokens: Sequence[int], found: list[int]) -> list[int]:
        """As many of the guesses behind these tokens as are a length of a step."""
        found = found[: max(k for k in (0, *COUNTS) if k <= len(found))]
        self.guessed = (len(tokens), found)
        return found
