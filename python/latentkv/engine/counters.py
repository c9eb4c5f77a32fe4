"""What an engine has done since its start."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

BOUNDS = (  # seconds
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0),
)


class Histogram:
    """How many values were at most each of BOUNDS and above the one before; the last of `counts` are above
    all."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(BOUNDS, value)] += 1
        self.sum += value


@dataclass
class Counters:
    """Tokens of prompts are counted when their answers end."""

    requests: int = 0
    prompt_tokens: int = 0  # computed
    cached_tokens: int = 0  # of prompts, found in the cache
    restored_tokens: int = 0  # of those, from the store
    predicted_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # of those
    prompt_seconds: float = 0.0
    predicted_seconds: float = 0.0
    steps: int = 0
    step_tokens: int = 0
    step_slots: int = 0
    longest: int = 0  # tokens of a prompt and its answer
    # seconds from a request to its first token, waiting included, and from one token to the next
    first_token: Histogram = field(default_factory=Histogram)
    next_token: Histogram = field(default_factory=Histogram)
