"""Stages that take long say so where there is no terminal."""

from __future__ import annotations

import io
import sys

import pytest

from latentkv.console import progress


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
    assert [progress.duration(s) for s in (119, 120, 7199, 9000)] == [
        "119 s",
        "2.0 min",
        "120.0 min",
        "2.5 h",
    ]
