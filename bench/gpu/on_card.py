"""A step's time on a card, from parts that were measured on a GPU of faster memory.

`consumer.py CARD --no-readers` runs the card's code with its limits, but memory as it is. Of a step there,

    t(0)              at an empty cache: the weights, and all that waits or computes
    t(depth) - t(0)   attention, which computes while it reads

the card's memory changes two parts: weights are read in bytes / bandwidth instead of here, and attention
takes what it takes here or what its rows take to be read, whichever is longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

READ_SHARE = 0.93  # of the data sheet's bandwidth, that a kernel which only reads gets of GDDR6X


@dataclass(frozen=True)
class Memory:
    """What a kernel that only reads gets, in GB/s."""

    here: float
    card: float

    @classmethod
    def of(cls, report: Mapping[str, Mapping[str, float]], card_gb_per_s: float) -> Memory:
        """report: of consumer.py. card_gb_per_s: of the card's data sheet."""
        return cls(report["alone"]["read_gb_per_s"], READ_SHARE * card_gb_per_s)


def tokens_per_s(
    here: Mapping[int, float], weight_bytes: float, bytes_per_token: float, memory: Memory
) -> dict[int, float]:
    """Tokens/s by depth on the card, from those here, which must have depth 0.

    weight_bytes: that a step reads. bytes_per_token: of the cache.
    """
    empty = 1 / here[0]
    weights = weight_bytes * (1e-9 / memory.card - 1e-9 / memory.here)
    found = {}
    for depth, tps in here.items():
        rows = depth * bytes_per_token * 1e-9 / memory.card
        found[depth] = 1 / (empty + weights + max(1 / tps - empty, rows))
    return found
