"""Allocators and searches: exact budgets, and what each method's own rule says on cases computed by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from latentkv_convert.errors import ConvertError
from latentkv_convert.ir import F64
from latentkv_convert.plan import search
from latentkv_convert.plan.allocate import RankProblem, budget, module, progressive, removal, spectrum, tails
from latentkv_convert.plan.methods import eigen, lorc

L, G, W = 4, 3, 64


def problem(keep: float, full: Sequence[int] = (), seed: int = 5) -> RankProblem:
    rng = np.random.default_rng(seed)
    rates = rng.uniform(0.02, 0.3, (L, 2, G))
    sigmas = {
        (i, s): tuple(np.exp(-r * np.arange(W)) for r in rates[i, "kv".index(s)])
        for i in range(L)
        for s in "kv"
    }
    stats = {
        "fisher": [{s: rng.random(G) + 0.1 for s in "kv"} for _ in range(L)],
        "sensitivity": [{s: rng.random(1) + 0.01 for s in "kv"} for _ in range(L)],
    }
    return RankProblem(
        range(L), G, W, keep, 16, stats, lambda layer, side: sigmas[layer, side], frozenset(full)
    )


@pytest.mark.parametrize("name", ["uniform", "fisher", "spectrum", "removal", "budget", "progressive"])
@pytest.mark.parametrize("keep", [0.25, 0.37, 0.5, 0.81, 1.0])
def test_every_allocator_meets_the_kept_fraction(name: str, keep: float) -> None:
    for full in ((), (0,)):
        if keep < 0.44 and full:
            continue  # one full layer of four and a unit for every other group is 0.4375
        ranks = module(name).allocate(problem(keep, full))
        assert set(ranks) == set(problem(keep, full).items)
        kept = sum(sum(groups) for groups in ranks.values()) + 2 * G * W * len(full)
        assert abs(kept - keep * problem(keep).channels) <= 8
        assert all(rank % 16 == 0 and 16 <= rank <= W for groups in ranks.values() for rank in groups)


def test_full_layers_that_eat_the_budget_are_refused() -> None:
    with pytest.raises(
        ConvertError, match=r"\[--keep\] expected at least 0\.4375 .*; got 0\.4; or fewer full layers"
    ):
        spectrum.allocate(problem(0.4, (0,)))


def test_removal_rate_is_equation_6() -> None:
    """One rate for all heads: the bisected rate and the sorted units give the same ranks."""
    case = problem(0.55)
    sigmas = [sigma for item in case.items for sigma in case.sigmas(*item)]
    for sigma in sigmas[:3]:  # the unique j with tail(j+1)/tail(0) <= r < tail(j)/tail(0), kept = j + 1
        for rate in (0.0, 0.01, 0.1, 0.5, 0.99):
            share = [sigma[j:].sum() / sigma.sum() for j in range(W)] + [0.0]
            brute = [j + 1 for j in range(W) if share[j + 1] <= rate < share[j]]
            assert [removal.kept(sigma, rate)] == brute
        assert removal.kept(sigma, 0.0) == W

    def units(rate: float) -> int:
        return sum(-(-removal.kept(sigma, rate) // 16) for sigma in sigmas)

    assert all(
        units(a) >= units(b)
        for a, b in zip(np.linspace(0, 0.9, 50), np.linspace(0.01, 0.91, 50), strict=True)
    )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if units(middle) >= case.total_units else (low, middle)
    assert units(low) == case.total_units
    bisected = [-(-removal.kept(sigma, low) // 16) * 16 for sigma in sigmas]
    ranks = removal.allocate(case)
    assert [rank for item in case.items for rank in ranks[item]] == bisected


def test_spectrum_keeps_what_holds_the_most_squared_energy() -> None:
    case = problem(0.5)
    ranks = spectrum.allocate(case)
    pairs = [(s, r) for item in case.items for s, r in zip(case.sigmas(*item), ranks[item], strict=True)]
    first_lost = [tails(sigma, 2)[rank] for sigma, rank in pairs if rank < W]
    last_kept = [tails(sigma, 2)[rank - 16] for sigma, rank in pairs if rank > 16]
    assert max(first_lost) <= min(last_kept)


def test_budget_gives_ranks_to_blocks_that_suffer() -> None:
    case = problem(0.5)
    for side in "kv":
        case.stats["sensitivity"][1][side][:] = 1e3  # type: ignore[index]
        case.stats["sensitivity"][2][side][:] = 1e-3  # type: ignore[index]
    ranks = budget.allocate(case)
    assert sum(ranks[1, "k"] + ranks[1, "v"]) > sum(ranks[2, "k"] + ranks[2, "v"]) + 64


def test_progressive_falls_with_depth() -> None:
    ranks = progressive.allocate(problem(0.7))
    totals = [sum(ranks[layer, "k"]) for layer in range(L)]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] == G * W  # d_max is the full width while d_min is at least a quarter of it
    low = progressive.allocate(problem(0.4))
    assert sum(low[0, "k"]) < G * W


def test_condition_numbers_are_summed_as_logarithms() -> None:
    """64 matrices of 1e5: the product overflows, the depth does not."""
    sigma = np.geomspace(1.0, 1e-5, 8)
    depth = lorc.relative_depth([[sigma, sigma]] * 32)
    with np.errstate(over="ignore"):
        assert np.isinf(np.prod(np.full(64, 1e5)))
    assert depth == pytest.approx(np.linspace(0, 1, 32))
    assert lorc.relative_depth([[sigma, sigma]]).tolist() == [0.0]


def test_depth_is_monotone_and_sigma_min_has_a_floor(capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    layers = [[np.geomspace(1.0, 10.0 ** -rng.uniform(0.5, 12), 16) for _ in "kv"] for _ in range(12)]
    depth = lorc.relative_depth(layers)
    assert (np.diff(depth) >= 0).all()
    assert depth[0] == 0
    assert depth[-1] == 1
    assert lorc.log_condition(np.array([1.0, 1e-14])) == pytest.approx(np.log(1e5))
    assert "warning: [condition numbers] expected sigma_min above 1e-05" in capsys.readouterr().err


def test_published_thresholds_are_steps_of_two_hundredths() -> None:
    """Unsquared and without the last column: 1.00 keeps 63 of 64, rounded up to 64."""
    flat: F64 = np.ones(64)
    assert eigen.count(flat, 0.5, published=True) == 31
    assert eigen.count(flat, 0.5, published=False) == 32
    steep = 2.0 ** -np.arange(64)
    assert eigen.count(steep, 0.99, published=True) == 6  # 1 - 2^-6 = 0.984 is the last below it
    assert eigen.count(steep, 0.99, published=False) == 4  # 1 - 4^-4 = 0.996 is the first that reaches it
    states = eigen.thresholds({"k": [flat], "v": [flat]}, published=True)
    assert [state["k"] for state in states] == [64, 48, 32]  # stops before 0.45 · 64
    assert [s["v"] for s in eigen.thresholds({"k": [flat], "v": [flat]}, published=False)] == [64, 48, 32, 16]


def test_all_heads_get_the_rank_of_the_neediest() -> None:
    flat, steep = np.ones(64), 2.0 ** -np.arange(64)
    states = eigen.thresholds({"k": [steep, flat], "v": [steep, steep]}, published=False)
    assert [(s["k"], s["v"]) for s in states] == [(64, 64), (64, 32), (64, 16), (48, 16), (32, 16), (16, 16)]


STATES = [[{"k": 64, "v": 64}, {"k": 48, "v": 64}, {"k": 32, "v": 48}, {"k": 16, "v": 16}]] * 2
ERRORS = [[0.0, 0.01, 0.05, 0.02], [0.0, 0.02, 0.03, 0.3]]


def test_search_reverts_to_the_last_state_that_passed() -> None:
    ranks = search.within(range(2), STATES, ERRORS, 0.04, n_kv=2)
    assert ranks == {(0, "k"): (48, 48), (0, "v"): (64, 64), (1, "k"): (32, 32), (1, "v"): (48, 48)}
    assert search.within(range(2), STATES, ERRORS, 1.0, n_kv=1)[0, "k"] == (16,)
    assert search.within(range(2), STATES, ERRORS, 1e-9, n_kv=1)[1, "k"] == (64,)


@pytest.mark.parametrize("keep", [0.25, 0.4, 0.55, 0.75, 0.9, 1.0])
def test_search_for_a_kept_fraction_is_exact(keep: float) -> None:
    sigma = np.geomspace(1, 0.01, 64)
    case = RankProblem(range(2), 3, 64, keep, 16, {}, lambda layer, side: (sigma,) * 3)
    ranks = search.to_budget(case, STATES, ERRORS)
    assert abs(sum(map(sum, ranks.values())) - keep * case.channels) <= 8
    if keep == 0.75:  # what an error budget of 0.04 leaves: nothing is taken in part
        assert ranks == search.within(range(2), STATES, ERRORS, 0.04, n_kv=3)


def test_states_that_end_too_early_are_refused() -> None:
    case = RankProblem(range(2), 1, 64, 0.2501, 16, {}, lambda layer, side: (np.ones(64),))
    with pytest.raises(ConvertError, match=r"\[--keep\] expected at least 0\.875; got 0\.2501"):
        search.to_budget(case, [chain[:2] for chain in STATES], ERRORS)
