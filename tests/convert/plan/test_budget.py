"""Budgets are met exactly, shares follow the weights, bounds hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentkv_convert.errors import ConvertError
from latentkv_convert.plan.allocate import RankProblem, by_weight
from latentkv_convert.plan.budget import split_groups, water_fill


@given(
    st.lists(st.tuples(st.floats(1e-9, 1e9), st.integers(1, 4), st.integers(0, 60)), min_size=1, max_size=40),
    st.floats(0, 1),
)
def test_total_is_exact_and_bounds_hold(items: list[tuple[float, int, int]], where: float) -> None:
    weights = np.array([weight for weight, _, _ in items])
    low = np.array([least for _, least, _ in items])
    high = low + np.array([room for _, _, room in items])
    total = round(low.sum() + where * (high.sum() - low.sum()))
    units = water_fill(weights, low, high, total)
    assert units.sum() == total
    assert (units >= low).all()
    assert (units <= high).all()


def test_shares_are_proportional_until_they_saturate() -> None:
    ones, room = np.ones(4, dtype=np.int64), np.full(4, 100, dtype=np.int64)
    assert water_fill(np.array([1.0, 2.0, 3.0, 4.0]), ones, room, 100).tolist() == [10, 20, 30, 40]
    # 4.0 saturates at 30; its excess goes to the others in proportion, not equally
    room[3] = 30
    assert water_fill(np.array([1.0, 2.0, 4.0, 40.0]), ones, room, 100).tolist() == [10, 20, 40, 30]


def test_remainders_go_to_the_largest_fractions() -> None:
    ones, room = np.ones(3, dtype=np.int64), np.full(3, 50, dtype=np.int64)
    assert water_fill(np.array([1.5, 2.7, 5.8]), ones, room, 10).tolist() == [1, 3, 6]


def test_impossible_budgets_are_refused() -> None:
    ones = np.ones(2, dtype=np.int64)
    with pytest.raises(ConvertError, match="expected 2 to 8 units; got 9"):
        water_fill(np.ones(2), ones, 4 * ones, 9)
    with pytest.raises(ConvertError, match="not all zero"):
        water_fill(np.zeros(2), ones, 4 * ones, 4)


def test_groups_share_equally_and_the_rest_follows_the_energy() -> None:
    flat, steep = np.full(64, 1.0), np.geomspace(1, 1e-3, 64)
    assert split_groups(5, [steep, flat], capacity=4, pad=16) == [2, 3]
    assert split_groups(8, [steep, flat], capacity=4, pad=16) == [4, 4]


@pytest.mark.parametrize("keep", [0.13, 0.3, 0.5, 0.77, 1.0])
@pytest.mark.parametrize("n_groups", [1, 3, 8])
def test_ranks_meet_the_kept_fraction(keep: float, n_groups: int) -> None:
    rng = np.random.default_rng(4)
    sigmas = {(i, s): tuple(rng.random((n_groups, 128))) for i in range(6) for s in "kv"}
    problem = RankProblem(
        layers=range(6),
        n_groups=n_groups,
        group_width=128,
        keep=keep,
        pad=16,
        stats={},
        sigmas=lambda layer, side: sigmas[layer, side],
    )
    ranks = by_weight(problem, rng.random(12) + 0.01)
    kept = sum(sum(groups) for groups in ranks.values())
    assert abs(kept - keep * 12 * n_groups * 128) <= 8
    assert all(rank % 16 == 0 and 16 <= rank <= 128 for groups in ranks.values() for rank in groups)
    if keep == 1.0:
        assert {rank for groups in ranks.values() for rank in groups} == {128}


def test_less_than_one_unit_per_group_is_refused() -> None:
    problem = RankProblem(range(2), 4, 64, 0.1, 16, {}, lambda layer, side: (np.ones(64),) * 4)
    with pytest.raises(ConvertError, match=r"\[--keep\] expected at least 0\.25"):
        by_weight(problem, np.ones(4))
