"""Windows of a text on threads of their own: the same numbers, in the same order, whatever their number."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from test_calibrate import stream

from latentkv_convert.calibrate import activations, copies, fisher, heads, moments, sensitivity
from latentkv_convert.compute import crew

Tiny = Callable[..., Path]


@pytest.fixture
def cores() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_steps_run_at_the_same_time_and_come_in_order(cores: Callable[[int], None]) -> None:
    cores(3)
    meeting = threading.Barrier(3, timeout=30)

    def step(at: int) -> tuple[int, int, int, bool]:
        meeting.wait()  # passes where three are here together
        return at, crew.current(), torch.get_num_threads(), torch.is_grad_enabled()

    with torch.no_grad():
        found = list(crew.each(step, 6))
    assert found == [(at, at, 1, False) for at in range(6)]
    assert torch.get_num_threads() == 3


def test_few_steps_share_the_cores(cores: Callable[[int], None]) -> None:
    cores(4)
    assert list(crew.each(lambda at: torch.get_num_threads(), 2)) == [2, 2]
    assert list(crew.each(lambda at: torch.get_num_threads(), 6)) == [1, 1, 1, 1, 2, 2]
    assert list(crew.each(lambda at: torch.get_num_threads(), 1)) == [4]
    assert list(crew.each(lambda at: threading.current_thread(), 2, "cuda")) == 2 * [threading.main_thread()]


def test_an_error_ends_the_rest(cores: Callable[[int], None]) -> None:
    cores(2)
    begun = []

    def step(at: int) -> None:
        begun.append(at)
        raise ValueError(f"step {at}")

    with pytest.raises(ValueError, match="step 0"):
        list(crew.each(step, 1000))
    assert sorted(begun) in ([0], [0, 1])
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("statistic", [moments, heads, sensitivity, fisher, copies, activations])
def test_statistics_do_not_depend_on_the_number_of_threads(
    tiny: Tiny, cores: Callable[[int], None], statistic: object
) -> None:
    more = {"sink": 2, "recent": 8, "seed": 0} if statistic is copies else {}
    found = []
    for n in (1, 2, 3):
        cores(n)
        layers = dict(statistic.collect(stream(tiny(), windows=5), **more))  # type: ignore[attr-defined]
        found.append(layers)
    for layers in found[1:]:
        for index, arrays in found[0].items():
            for name, array in arrays.items():
                np.testing.assert_array_equal(layers[index][name], array, err_msg=f"{index} {name}")


def test_what_watches_a_pass_does_not_depend_on_it_either(tiny: Tiny, cores: Callable[[int], None]) -> None:
    found = []
    for n in (1, 3):
        cores(n)
        live, meter = stream(tiny(), windows=5), activations.Activations()
        live.watchers.append(meter)
        for _ in moments.collect(live):
            pass
        found.append([meter.layer(index) for index in range(live.spec.n_layer)])
    for one, other in zip(*found, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])
