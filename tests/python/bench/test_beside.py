"""bench/gpu/beside.py: caches take turns, and rounds count where the companion left the card's bandwidth."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from gpu.beside import Around, Cache, Companion, rows_at, taken

WANTED = 1000.0
OPTIONS = argparse.Namespace(turns=2, steps=1, drift=0.1, patience=60.0, prefill=8, prefill_depth=64)


class Told(Companion):
    """Answers as they were written down."""

    def __init__(self, light: list[float], mhz: list[float]) -> None:
        self.wanted = WANTED
        self.steered: list[bool] = []
        self._light, self._mhz = iter(light), iter(mhz)

    def light(self, steer: bool) -> float:
        self.steered.append(steer)
        return next(self._light)

    def mhz(self) -> float:
        return next(self._mhz)


class Timed(Cache):
    """A cache whose steps take what it was made with."""

    def __init__(self, name: str, seconds: Iterator[float]) -> None:
        self.name, self.bytes_per_token, self._seconds = name, 10, seconds

    def turn(self, n: int) -> float:
        return next(self._seconds)

    def prompt(self, n: int) -> float:
        return 100.0


def caches() -> list[Cache]:
    return [Timed("m f16", iter([2.0, 4.0, 8.0, 6.0])), Timed("m-14", iter([1.0, 2.0, 2.0, 3.0]))]


def test_a_round_with_other_bandwidth_or_another_clock_is_taken_again() -> None:
    light = [
        1000,
        990,
        1000,
        1900,
        1010,
        1000,
        1000,
        1050,
    ]  # before and behind; the second round's is far off
    companion = Told(light, [1980, 1980, 1980, 1980, 900, 1980, 1980, 1980])
    seconds, around = taken(caches(), OPTIONS, companion)
    assert seconds == {"m f16": [2.0, 6.0], "m-14": [1.0, 3.0]}  # the first and the fourth
    assert companion.steered == 4 * [True, False]
    assert (around.thrown, around.thrown_light) == (2, [1000, 1900, 1010, 1000])
    assert around.light_gb_per_s == [1000, 990, 1000, 1050]


def test_a_drift_of_both_answers_is_thrown_away_too() -> None:
    assert not Around().keeps([850.0, 850.0], [1980.0, 1980.0], WANTED, 0.1)
    assert Around().keeps([910.0, 1090.0], [1980.0, 1900.0], WANTED, 0.1)


def test_rows_are_shares_of_the_first_cache_in_the_same_turns() -> None:
    rows = list(rows_at(64, caches(), OPTIONS, None))
    assert [row["of_first"] for row in rows] == [1.0, 2.0]
    assert [row["decode_tps"] for row in rows] == [1 / 3.0, 1 / 1.5]
    assert [row["prefill_tps"] for row in rows] == [100.0, 100.0]


def test_nothing_is_said_where_no_round_counts() -> None:
    options = argparse.Namespace(**{**vars(OPTIONS), "patience": 0.0})
    rows = list(rows_at(0, caches(), options, Told([500.0] * 2, [1980.0] * 2)))
    assert [(row["decode_tps"], row["of_first"], row["thrown"]) for row in rows] == 2 * [(None, None, 1)]
