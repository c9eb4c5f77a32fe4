"""Formats by one price per byte, against every plan there is."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from latentkv.errors import LatentKVError
from latentkv.plan import allocation
from latentkv.plan.allocation import Choice, Group, Table

Plan = tuple[int, float]  # bytes, distortion


def table(rng: np.random.Generator, n_segments: int) -> Table:
    """Segments of falling importance, formats of 12, 8, 4 and 0 bytes."""
    scale = np.sort(rng.exponential(size=n_segments))[::-1] * rng.uniform(0.5, 2)
    distortion = scale[:, None] * np.array([0.02, 0.1, 0.4, 1.0]) * rng.uniform(0.7, 1.3, (n_segments, 4))
    return Table(np.tile([12, 8, 4, 0], (n_segments, 1)), distortion)


def problem(seed: int) -> list[Group]:
    rng = np.random.default_rng(seed)
    return [(table(rng, 2), table(rng, 3)), (table(rng, 3),)]


def every_plan(groups: list[Group]) -> list[Plan]:
    per_group: list[list[Plan]] = []
    for group in groups:
        plans = []
        for cut in group:
            n, drop = cut.cost.shape[0], cut.cost.shape[1] - 1
            for options in itertools.product(range(drop + 1), repeat=n):
                if options[0] != drop and list(options) == sorted(options):
                    at = np.array(options)
                    plans.append((cut.bytes(at), cut.total(at)))
        per_group.append(plans)
    return [(sum(p[0] for p in c), sum(p[1] for p in c)) for c in itertools.product(*per_group)]


def hull(plans: list[Plan]) -> list[Plan]:
    """The lower convex hull, cheapest first."""
    found: list[Plan] = []
    for size, cost in sorted(plans):
        while len(found) > 1 and (found[-1][1] - found[-2][1]) * (size - found[-2][0]) >= (
            cost - found[-2][1]
        ) * (found[-1][0] - found[-2][0]):
            found.pop()
        if not found or cost < found[-1][1]:
            found.append((size, cost))
    return found


def measure(groups: list[Group], choices: list[Choice]) -> Plan:
    size = sum(group[c.table].bytes(c.formats) for group, c in zip(groups, choices, strict=True))
    return size, allocation.total(groups, choices)


@pytest.mark.parametrize("seed", range(5))
def test_equals_the_best_plan_wherever_one_price_can_name_it(seed: int) -> None:
    groups = problem(seed)
    for size, cost in hull(every_plan(groups))[1:]:
        got = measure(groups, allocation.allocate(groups, size))
        assert got[0] <= size
        assert got[1] == pytest.approx(cost, rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_any_budget_is_met_from_below_and_used(seed: int) -> None:
    groups = problem(seed)
    plans = every_plan(groups)
    edge = hull(plans)
    for budget in range(edge[0][0], edge[-1][0] + 8):
        size, cost = measure(groups, allocation.allocate(groups, budget))
        assert size <= budget
        best = min(cost for size, cost in plans if size <= budget)
        below = max(point for point in edge if point[0] <= budget)
        assert best - 1e-12 <= cost <= below[1] + 1e-12


def test_bits_never_rise_along_a_row() -> None:
    """Though segments of random importance would like them to."""
    rng = np.random.default_rng(0)
    groups: list[Group] = []
    for _ in range(4):
        sorted_table = table(rng, 8)
        groups.append((Table(sorted_table.cost, sorted_table.distortion[rng.permutation(8)]),))
    for budget in (16, 60, 120, 200, 300):
        for choice in allocation.allocate(groups, budget):
            options = choice.formats.tolist()
            assert options[0] != 3
            assert options == sorted(options)


def test_32_layers_are_planned_in_a_fifth_of_a_second() -> None:
    """K and V of 2048 channels in segments of 32, nine formats: while a file is opened."""
    rng = np.random.default_rng(0)
    bits = np.array([16, 8, 6, 5, 4, 3, 2, 1, 0])
    cost = np.tile(np.where(bits == 0, 0, 4 * bits + 4), (64, 1))
    groups: list[Group] = []
    for _ in range(64):
        variance = np.exp(-np.arange(64) / 6 + 0.3 * rng.standard_normal(64) + rng.standard_normal())
        groups.append((Table(cost, variance[:, None] * 4.0**-bits),))
    seconds = []
    for share in (0.3, 0.14, 0.08):
        begin = time.process_time()
        size, _ = measure(groups, allocation.allocate(groups, int(share * 64 * 64 * 64), 3.0))
        seconds.append(time.process_time() - begin)
        assert 0.99 * share < size / (64 * 64 * 64) <= share
    assert min(seconds) < 0.2


def test_a_penalty_keeps_what_would_be_dropped() -> None:
    groups = [(table(np.random.default_rng(1), 8),) for _ in range(4)]
    dropped = [
        sum(int((choice.formats == 3).sum()) for choice in allocation.allocate(groups, 150, penalty))
        for penalty in (1.0, 10.0)
    ]
    assert dropped[1] < dropped[0]


def test_a_budget_below_the_smallest_plan_is_refused() -> None:
    with pytest.raises(LatentKVError, match=r"\[--kv-budget\] expected 8 bytes or more for .* got 7"):
        allocation.allocate(problem(0), 7)


def test_exact_tokens_pay_for_their_format() -> None:
    """Of rooms and prices the pair that loses least; a room below the cheapest plan is none."""
    groups = problem(3)
    least, most = allocation.least(groups), 36 + 36
    rooms = {"wide": least + 8, "narrow": most}
    gain = allocation.total(groups, allocation.allocate(groups, rooms["wide"])) - allocation.total(
        groups, allocation.allocate(groups, rooms["narrow"])
    )
    for price, best in ((0.9 * gain, "narrow"), (1.1 * gain, "wide")):
        name, chosen = allocation.allocate_beside(
            groups, rooms, {"wide": 0.0, "narrow": 2 * price}, lambda x: 2 * x
        )
        assert name == best
        assert sum(g[c.table].bytes(c.formats) for g, c in zip(groups, chosen, strict=True)) <= rooms[name]
    prices = {"wide": 0.0, "narrow": 1e9}
    assert allocation.allocate_beside(groups, rooms | {"wide": least - 1}, prices, float)[0] == "narrow"
    with pytest.raises(LatentKVError, match=rf"bytes or more for compressed rows; got {least - 1}"):
        allocation.allocate_beside(groups, {"wide": least - 2, "narrow": least - 1}, prices, float)


def test_exact_tokens_are_wide_where_they_are_few() -> None:
    exact = {"f16": 200, "q8_0": 106}
    assert allocation.exact_formats(exact, 1000) == ["f16"]
    assert allocation.exact_formats(exact, 999) == ["f16", "q8_0"]
