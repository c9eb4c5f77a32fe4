"""One byte budget over many segments: every segment gets the format whose distortion is worth its bytes.

Choices are separable, except that a group is cut in segments in one of a few ways and that options never rise
along a row: a segment stores no more bits than the one before it, and what is dropped is dropped at the end.
For one price λ per byte the best choice is found exactly: the sequence of options that minimises distortion +
λ·bytes, by dynamic programming from the last segment to the first, and the best way of cutting. λ is bisected
to the budget; what is left goes to the best single upgrades. The converter plans a file with this, and a
master file is planned with it when it is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from latentkv.errors import expected

Units = NDArray[np.int64]
F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Table:
    """One group cut in segments, in order of importance; options from the widest format to the narrowest, the
    last one drops a segment, at 0 bytes."""

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
    formats: Units  # [segments] options, not falling


Group = Sequence[Table]  # the ways to cut it
# The 1.5B at 8.5 % of 65536 tokens, 4096, 16384 and 32768 of them in it: 0.0023, 0.011 and 0.0061 nats where
# exact tokens are q8_0, which costs least in a full cache; 0.000001, 0.0085 and 0.0064 where they are f16.
LITTLE = 0.2
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
        wanted = f"{least(groups)} bytes or more for compressed rows"
        raise expected("--kv-budget", wanted, budget, "raise it")
    stack = _Stack.of(groups)
    best = [_cheapest(group) for group in groups]
    free = stack.best(0.0)
    if _bytes(groups, free) <= budget:
        return free
    low, high = 0.0, 1.0
    while _bytes(groups, stack.best(high)) > budget and high < 1e30:
        high *= 16
    for _ in range(_HALVINGS):
        price = high / 16 if low == 0 else float(np.sqrt(low * high))
        chosen = stack.best(price)
        if _bytes(groups, chosen) <= budget:
            best, high = chosen, price
        else:
            low = price
    return _upgraded(groups, best, budget)


def exact_formats(exact: Mapping[str, int], budget: int) -> list[str]:
    """Row formats of exact tokens to choose from. exact: their bytes, the widest first: that one alone where
    it takes little of the budget, as more than the window stays exact in it while there is room."""
    widest = next(iter(exact))
    return [widest] if exact[widest] <= LITTLE * budget else list(exact)


def rooms(exact: Mapping[str, int], budget: int, n_ctx: int, n_ctx_train: int) -> dict[str, int]:
    """Bytes for compressed rows by the row format of exact tokens, of those that the budget is enough for. It
    is one of n_ctx tokens, of which a model may be trained for fewer."""
    names = exact_formats(exact, budget * min(n_ctx, n_ctx_train) // n_ctx)
    return {name: budget - exact[name] for name in names if exact[name] < budget}


def allocate_beside(
    groups: Sequence[Group],
    rooms: Mapping[str, int],
    prices: Mapping[str, float],
    nats: Callable[[float], float],
    drop_penalty: float = 1.0,
) -> tuple[str, list[Choice]]:
    """The row format of exact tokens and what `allocate` finds beside it, which cost least together.

    By that format: rooms, the bytes it leaves; prices, the nats per token that it costs. nats: what a summed
    distortion costs.

    Raises:
        LatentKVError: none leaves enough for the cheapest plan.
    """
    needed = min(least(groups), max(rooms.values()))  # where none is enough, the error is of the largest
    found = {name: allocate(groups, room, drop_penalty) for name, room in rooms.items() if room >= needed}
    best = min(found, key=lambda name: prices[name] + nats(total(groups, found[name], drop_penalty)))
    return best, found[best]


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
    return replace(table, distortion=distortion)


@dataclass(frozen=True)
class _Stack:
    """All tables of all groups, padded to one number of segments by some that cost nothing when dropped and
    are never stored. A first segment is never dropped."""

    cost: F64  # [tables, segments, options]
    distortion: F64
    groups: Sequence[Group]

    @classmethod
    def of(cls, groups: Sequence[Group]) -> _Stack:
        tables = [table for group in groups for table in group]
        longest = max(len(table.cost) for table in tables)
        arrays = []
        for each in ([t.cost for t in tables], [t.distortion for t in tables]):
            padded = np.full((len(tables), longest, tables[0].cost.shape[1]), np.inf)
            padded[:, :, -1] = 0
            for row, array in zip(padded, each, strict=True):
                row[: len(array)] = array
            padded[:, 0, -1] = np.inf
            arrays.append(padded)
        return cls(arrays[0], arrays[1], groups)

    def best(self, price: float) -> list[Choice]:
        """The table and options of least distortion + price · bytes, for every group."""
        formats, score = _falling(self.distortion + (price * self.cost if price else 0.0))
        chosen, begin = [], 0
        for group in self.groups:
            index = int(score[begin : begin + len(group)].argmin())
            chosen.append(Choice(index, formats[begin + index, : len(group[index].cost)]))
            begin += len(group)
        return chosen


def _falling(score: F64) -> tuple[Units, F64]:
    """score [tables, segments, options] -> the options [tables, segments] of least sum [tables] that never
    fall."""
    n_tables, n_segments, n_options = score.shape
    pick = np.empty((n_segments, n_tables, n_options), dtype=np.int64)
    rest = np.zeros((n_tables, n_options))  # of the segments after, by the least option they may take
    for segment in reversed(range(n_segments)):
        own = score[:, segment] + rest
        rest = np.minimum.accumulate(own[:, ::-1], axis=1)[:, ::-1]
        here = np.where(own <= rest, np.arange(n_options), n_options)
        pick[segment] = np.minimum.accumulate(here[:, ::-1], axis=1)[:, ::-1]
    formats, at = np.empty((n_tables, n_segments), dtype=np.int64), np.zeros(n_tables, dtype=np.int64)
    for segment in range(n_segments):
        at = formats[:, segment] = pick[segment, np.arange(n_tables), at]
    return formats, rest[:, 0]


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
    rows = np.arange(len(current))
    more = table.cost - table.cost[rows, current][:, None]
    less = table.distortion[rows, current][:, None] - table.distortion
    before = np.concatenate([[0], current[:-1]])
    legal = (np.arange(table.cost.shape[1]) >= before[:, None]) & (more > 0) & (more <= room) & (less > 0)
    rate = np.where(legal, less / np.maximum(more, 1), 0.0)
    segment, option = np.unravel_index(int(rate.argmax()), rate.shape)
    return _Upgrade(float(rate[segment, option]), int(more[segment, option]), int(segment), int(option))


def _bytes(groups: Sequence[Group], choices: Sequence[Choice]) -> int:
    return sum(group[c.table].bytes(c.formats) for group, c in zip(groups, choices, strict=True))
