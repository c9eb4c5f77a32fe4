"""Stages that take long say so where there is no terminal."""

from __future__ import annotations

import io
import re
import sys
import time

import pytest

from latentkv.console import progress, whole
from latentkv.console.durations import duration
from latentkv.console.whole import Whole


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run(total: int, seconds_each: float, fails_at: int | None = None) -> list[str]:
    clock, out = Clock(), io.StringIO()
    with progress.Lines(total, "calibrate", "window", out, clock) as lines:
        for i in range(total):
            clock.now += seconds_each
            if i == fails_at:
                raise KeyboardInterrupt
            lines.update(1)
    return out.getvalue().splitlines()


def test_a_short_stage_is_silent() -> None:
    assert run(9, 1.0) == []


def test_a_long_stage_says_how_far_it_is_and_what_is_left() -> None:
    assert run(100, 2.0) == [
        "calibrate: 5 of 100 windows, 10 s, about 3.2 min left",
        "calibrate: 20 of 100 windows, 40 s, about 2.7 min left",
        "calibrate: 35 of 100 windows, 70 s, about 2.2 min left",
        "calibrate: 50 of 100 windows, 100 s, about 100 s left",
        "calibrate: 65 of 100 windows, 2.2 min, about 70 s left",
        "calibrate: 80 of 100 windows, 2.7 min, about 40 s left",
        "calibrate: 95 of 100 windows, 3.2 min, about 10 s left",
        "calibrate: 100 windows in 3.3 min",
    ]


def test_a_stage_that_is_stopped_does_not_claim_to_have_ended() -> None:
    with pytest.raises(KeyboardInterrupt):
        run(100, 2.0, fails_at=99)


def test_without_a_terminal_there_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert isinstance(progress.stage(3, "write", "tensor"), progress.Lines)


def test_a_line_says_the_loss_too() -> None:
    clock, out = Clock(), io.StringIO()
    with progress.Lines(300, "finetune", "step", out, clock) as lines:
        lines.note("loss 2.345")
        clock.now += 20
        lines.update(100)
        lines.update(200)
    assert out.getvalue().splitlines() == [
        "finetune: 100 of 300 steps, 20 s, about 40 s left, loss 2.345",
        "finetune: 300 steps in 20 s",
    ]


def test_hours_are_hours() -> None:
    assert [duration(s) for s in (119, 120, 7199, 9000)] == [
        "119 s",
        "2.0 min",
        "120.0 min",
        "2.5 h",
    ]


STEPS = [("reading", 1.0), ("measuring", 4.0), ("choosing", 1.0), ("choosing", 1.0), ("writing", 3.0)]


def quiet(clock: Clock | None = None) -> Whole:
    return Whole(STEPS, io.StringIO(), clock or Clock())


def test_one_line_says_the_stage_and_what_is_left_of_all() -> None:
    clock = Clock()
    with quiet(clock) as job:
        job.begin("reading")
        assert job.line() == "stage 1 of 4, reading: 0 s"
        clock.now += 10
        with progress.stage(8, "measuring", "window") as part:
            part.update(2)
            clock.now += 10
            assert job.line() == "stage 2 of 4, measuring: 20 % of all, 20 s, about 80 s left"
            part.note("loss 2.3")
            assert job.line().endswith("about 80 s left, loss 2.3")
        assert job.share() == pytest.approx(0.5)


@pytest.mark.parametrize("slower", [1.0, 1.2, 3.0])
def test_what_is_left_begins_with_what_was_expected(slower: float) -> None:
    """In seconds. A machine that keeps its word keeps the sum of what was spent and what is left; one that
    does not is believed little by little."""
    clock = Clock()
    job = Whole([("reading", 3.0), ("measuring", 27.0)], io.StringIO(), clock, in_seconds=True)
    with job:
        job.begin("reading")
        assert job.line() == "stage 1 of 2, reading: 0 % of all, 0 s, about 30 s left"
        sums = []
        with progress.stage(27, "measuring", "window") as part:
            clock.now += 3 * slower
            for _ in range(27):
                clock.now += slower
                part.update(1)
                spent, left = (float(word) for word in re.findall(r"(\d+(?:\.\d+)?) s", job.line())[:2])
                sums.append(spent + left)
    assert sums[-1] == pytest.approx(30 * slower, abs=1)
    assert max(sums) < 30 * slower + 2
    assert sums[0] <= 30 + 15 * (slower - 1)
    assert sums == pytest.approx(sorted(sums), abs=2)


def test_a_stage_of_two_parts_has_one_number() -> None:
    with quiet() as job:
        for _ in range(2):
            with progress.stage(1, "choosing") as part:
                part.update(1)
                assert "stage 3 of 4, choosing" in job.line()
        job.begin("writing")
        assert "stage 4 of 4" in job.line()


def test_what_was_not_necessary_is_not_counted() -> None:
    """As of statistics that are in the cache."""
    with quiet() as job:
        job.begin("reading")
        with progress.stage(1, "choosing") as part:
            part.update(1)
            assert job.share() == pytest.approx(2 / 6)  # measuring has fallen out of the whole


def test_a_stage_that_is_done_once_more_is_more_to_do() -> None:
    with quiet() as job:
        for _ in range(2):
            with progress.stage(4, "measuring") as part:
                part.update(4)
        assert job.share() == pytest.approx(8 / 13)
        assert "stage 2 of 4" in job.line()


def test_what_is_done_does_not_fall_when_there_is_more_to_do() -> None:
    with quiet() as job:
        shares = []
        for _ in range(5):  # three more than were announced
            with progress.stage(1, "choosing") as part:
                shares.append(job.share())
                part.update(1)
                shares.append(job.share())
        assert shares == sorted(shares)
        assert shares[-1] < 1


def test_what_an_earlier_process_has_done_is_not_counted() -> None:
    with quiet() as job, progress.stage(2, "measuring", of=8) as part:
        part.update(1)
        assert job.share() == pytest.approx(0.5 / 6)


def test_a_stage_that_nobody_announced_is_one_more() -> None:
    with quiet() as job, progress.stage(2, "finetune", "step") as part:
        part.update(1)
        assert "finetune" in job.line()


def test_nothing_is_silent_for_longer_than_its_period(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no step ends."""
    monkeypatch.setattr(whole, "LINE", 0.02)
    out = io.StringIO()
    with Whole(STEPS, out) as job:
        job.begin("reading")
        deadline = time.monotonic() + 5
        while out.getvalue().count("\n") < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    lines = out.getvalue().splitlines()
    assert len(lines) >= 3
    assert all(line.startswith(("stage 1 of 4, reading: ", "done in ")) for line in lines)
    assert whole.current is None
    time.sleep(0.1)
    assert out.getvalue().splitlines() == lines, "it ends with its job"


def test_a_short_job_is_silent_and_one_that_fails_does_not_say_that_it_is_done() -> None:
    clock, out = Clock(), io.StringIO()
    with Whole(STEPS, out, clock):
        clock.now += 9
    assert out.getvalue() == ""
    job = Whole(STEPS, out, clock)
    job.__enter__()
    clock.now += 99
    job.__exit__(KeyboardInterrupt)
    assert out.getvalue() == ""
    with Whole(STEPS, out, clock):
        clock.now += 99
    assert out.getvalue() == "done in 99 s\n"
