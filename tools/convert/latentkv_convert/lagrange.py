"""One byte budget over many segments: every segment gets the format whose distortion is worth its bytes.

Choices are separable, except that a group is cut in segments in one of a few ways and may only drop its
trailing ones. For one price λ per byte the best choice is found exactly: every stored segment minimises
distortion + λ·bytes on its own, the cut is the best of all prefixes, and so is the way of cutting. λ is
bisected to the budget; what is left goes to the best single upgrades.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .budget import Units
from .errors import ConvertError
from .ir import F64


@dataclass(frozen=True)
class Table:
    """One group cut in segments, in order of importance; the last option drops a segment at 0 bytes."""

    cost: Units  # [segments, options] bytes
    distortion: F64  # [segments, options]

    def bytes(self, formats: Units) -> int:
        return int(self.cost[np.arange(len(formats)), formats].sum())

    def total(self, formats: Units) -> float:
        """Summed distortion."""
        return float(self.distortion[np.arange(len(formats)), formats].sum())


@dataclass(frozen=True)
class Choice:
    table: int  # which of a group's tables
    formats: Units  # [segments] options


Group = Sequence[Table]  # the ways to cut it


def allocate(groups: Sequence[Group], budget: int) -> list[Choice]:
    """A table and an option per segment for every group, within `budget` bytes together.

    Every group stores at least its first segment.

    Raises:
        ConvertError: the budget is below the cheapest plan.
    """
    best = [_cheapest(group) for group in groups]
    if _bytes(groups, best) > budget:
        least = _bytes(groups, best)
        raise ConvertError(
            "--kv-budget", f"{least} bytes or more per token for compressed rows", str(budget), "raise it"
        )
    free = [_best(group, 0.0) for group in groups]
    if _bytes(groups, free) <= budget:
        return free
    low, high = 0.0, 1.0
    while _bytes(groups, [_best(group, high) for group in groups]) > budget and high < 1e30:
        high *= 16
    for _ in range(100):
        price = high / 16 if low == 0 else float(np.sqrt(low * high))
        chosen = [_best(group, price) for group in groups]
        if _bytes(groups, chosen) <= budget:
            best, high = chosen, price
        else:
            low = price
    return _upgraded(groups, best, budget)


def total(groups: Sequence[Group], choices: Sequence[Choice]) -> float:
    """Summed distortion of a choice."""
    return sum(group[c.table].total(c.formats) for group, c in zip(groups, choices, strict=True))


def _best(group: Group, price: float) -> Choice:
    choices = [Choice(index, _formats(table, price)) for index, table in enumerate(group)]
    return min(
        choices, key=lambda c: group[c.table].total(c.formats) + price * group[c.table].bytes(c.formats)
    )


def _formats(table: Table, price: float) -> Units:
    drop = table.cost.shape[1] - 1
    score = table.distortion + price * table.cost
    kept = score[:, :drop].argmin(axis=1)
    gain = score[:, drop] - score[np.arange(len(kept)), kept]
    kept[1 + int(np.argmax(np.cumsum(gain))) :] = drop
    return kept


def _cheapest(group: Group) -> Choice:
    choices = []
    for index, table in enumerate(group):
        formats = np.full(len(table.cost), table.cost.shape[1] - 1)
        formats[0] = table.cost[0, :-1].argmin()
        choices.append(Choice(index, formats))
    return min(choices, key=lambda c: group[c.table].bytes(c.formats))


def _upgraded(groups: Sequence[Group], chosen: Sequence[Choice], budget: int) -> list[Choice]:
    """Greedy: the single change of most distortion per byte that still fits, until none does."""
    tables = [group[choice.table] for group, choice in zip(groups, chosen, strict=True)]
    formats = [choice.formats.copy() for choice in chosen]
    room = budget - _bytes(groups, chosen)
    while True:
        found = [_upgrade(table, current, room) for table, current in zip(tables, formats, strict=True)]
        rate, index = max((change[0], index) for index, change in enumerate(found))
        if rate <= 0:
            return [Choice(c.table, current) for c, current in zip(chosen, formats, strict=True)]
        _, segment, option = found[index]
        room -= int(
            tables[index].cost[segment, option] - tables[index].cost[segment, formats[index][segment]]
        )
        formats[index][segment] = option


def _upgrade(table: Table, current: Units, room: int) -> tuple[float, int, int]:
    """Distortion saved per byte, segment, option; a rate of 0 where nothing fits."""
    stored = int((current != table.cost.shape[1] - 1).sum())
    rows = np.arange(min(stored + 1, len(current)))  # the stored ones and the first dropped
    more = table.cost[rows] - table.cost[rows, current[rows]][:, None]
    less = table.distortion[rows, current[rows]][:, None] - table.distortion[rows]
    rate = np.where((more > 0) & (more <= room) & (less > 0), less / np.maximum(more, 1), 0.0)
    segment, option = np.unravel_index(int(rate.argmax()), rate.shape)
    return float(rate[segment, option]), int(segment), int(option)


def _bytes(groups: Sequence[Group], choices: Sequence[Choice]) -> int:
    return sum(group[c.table].bytes(c.formats) for group, c in zip(groups, choices, strict=True))
