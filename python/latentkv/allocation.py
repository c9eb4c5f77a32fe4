"""One byte budget over many segments: every segment gets the format whose distortion is worth its bytes.

Choices are separable, except that a group is cut in segments in one of a few ways and may only drop its
trailing ones. For one price λ per byte the best choice is found exactly: every stored segment minimises
distortion + λ·bytes on its own, the cut is the best of all prefixes, and so is the way of cutting. λ is
bisected to the budget; what is left goes to the best single upgrades. The converter plans a file with this,
and a master file is planned with it when it is opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from latentkv.errors import expected

Units = NDArray[np.int64]
F64 = NDArray[np.float64]


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
_HALVINGS = 44  # of a factor of 16: the price to 1e-13 of itself


def allocate(groups: Sequence[Group], budget: int, drop_penalty: float = 1.0) -> list[Choice]:
    """A table and an option per segment for every group, within `budget` bytes together.

    Every group stores at least its first segment. A dropped segment counts `drop_penalty` times its
    distortion: truncation errors of one token are not independent, as rounding errors are.

    Raises:
        LatentKVError: the budget is below the cheapest plan.
    """
    groups = [[_penalised(table, drop_penalty) for table in group] for group in groups]
    if budget < least(groups):
        wanted = f"{least(groups)} bytes or more per token for compressed rows"
        raise expected("--kv-budget", wanted, budget, "raise it")
    best = [_cheapest(group) for group in groups]
    free = [_best(group, 0.0) for group in groups]
    if _bytes(groups, free) <= budget:
        return free
    low, high = 0.0, 1.0
    while _bytes(groups, [_best(group, high) for group in groups]) > budget and high < 1e30:
        high *= 16
    for _ in range(_HALVINGS):
        price = high / 16 if low == 0 else float(np.sqrt(low * high))
        chosen = [_best(group, price) for group in groups]
        if _bytes(groups, chosen) <= budget:
            best, high = chosen, price
        else:
            low = price
    return _upgraded(groups, best, budget)


def least(groups: Sequence[Group]) -> int:
    """Bytes of the cheapest plan."""
    return _bytes(groups, [_cheapest(group) for group in groups])


def total(groups: Sequence[Group], choices: Sequence[Choice], drop_penalty: float = 1.0) -> float:
    """Summed distortion of a choice."""
    chosen = [(_penalised(group[c.table], drop_penalty), c) for group, c in zip(groups, choices, strict=True)]
    return sum(table.total(c.formats) for table, c in chosen)


def _penalised(table: Table, drop_penalty: float) -> Table:
    distortion = table.distortion.copy()
    distortion[:, -1] *= drop_penalty
    return Table(table.cost, distortion)


def _best(group: Group, price: float) -> Choice:
    choices = [Choice(index, _formats(table, price)) for index, table in enumerate(group)]
    if len(choices) == 1:
        return choices[0]
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
    found = [_upgrade(table, current, room) for table, current in zip(tables, formats, strict=True)]
    while True:
        index = max(range(len(found)), key=lambda i: found[i].rate)
        change = found[index]
        if change.rate <= 0:
            return [Choice(c.table, current) for c, current in zip(chosen, formats, strict=True)]
        if change.more <= room:  # it may have been found when there was more room
            room -= change.more
            formats[index][change.segment] = change.option
        found[index] = _upgrade(tables[index], formats[index], room)


@dataclass(frozen=True)
class _Upgrade:
    rate: float  # distortion saved per byte; 0 where nothing fits
    more: int  # bytes
    segment: int
    option: int


def _upgrade(table: Table, current: Units, room: int) -> _Upgrade:
    stored = int((current != table.cost.shape[1] - 1).sum())
    rows = np.arange(min(stored + 1, len(current)))  # the stored ones and the first dropped
    more = table.cost[rows] - table.cost[rows, current[rows]][:, None]
    less = table.distortion[rows, current[rows]][:, None] - table.distortion[rows]
    rate = np.where((more > 0) & (more <= room) & (less > 0), less / np.maximum(more, 1), 0.0)
    segment, option = np.unravel_index(int(rate.argmax()), rate.shape)
    return _Upgrade(float(rate[segment, option]), int(more[segment, option]), int(segment), int(option))


def _bytes(groups: Sequence[Group], choices: Sequence[Choice]) -> int:
    return sum(group[c.table].bytes(c.formats) for group, c in zip(groups, choices, strict=True))
