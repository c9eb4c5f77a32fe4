"""How far a stage is, on standard error: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.progress import MofNCompleteColumn, TextColumn, TimeRemainingColumn

from latentkv.console import terminal, whole
from latentkv.console.durations import duration
from latentkv.console.stage import Stage, bar

FIRST_LINE = 10.0  # seconds into a stage; shorter ones say nothing
NEXT_LINE = 30.0
_REDRAW = 0.1  # seconds; not by a thread of its own, which would disturb what is measured


def stage(total: int, label: str, unit: str = "layer", of: int | None = None) -> Stage:
    """`with stage(960, "bench", "run") as progress` shows a bar or prints lines. Inside a `Whole` it is part
    of that. of: what `total` was before an earlier process had done some of it."""
    if whole.current is not None:
        return whole.current.part(total, label, unit, of)
    screen = terminal.console(sys.stderr)
    return Bar(total, label, unit, screen) if terminal.has_width(screen) else Lines(total, label, unit)


class Bar(Stage):
    """One line that is redrawn in place and removed at the end. Text printed to standard error meanwhile
    appears above it."""

    def __init__(self, total: int, label: str, unit: str, screen: Console) -> None:
        super().__init__(total, label, unit)
        self._next = 0.0
        counts = MofNCompleteColumn(), TextColumn("{task.fields[unit]}s")
        left = TimeRemainingColumn(elapsed_when_finished=True)
        self._drawn = bar(screen, 80, *counts, left, TextColumn("{task.fields[note]}", markup=False))
        self._task = self._drawn.add_task(label, total=total or None, unit=unit, note="")

    def __enter__(self) -> Bar:
        self._drawn.start()
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        self._drawn.stop()

    def _show(self) -> None:
        if (now := time.monotonic()) >= self._next:
            self._next = now + _REDRAW
            total = self.total or None
            self._drawn.update(self._task, total=total, completed=self._done, note=self._note, refresh=True)


class Lines(Stage):
    """`calibrate: 120 of 960 windows, 41 s, about 4.8 min left`, for logs and pipes."""

    def __init__(
        self,
        total: int,
        label: str,
        unit: str,
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(total, label, unit)
        self._clock, self._start, self._out = clock, clock(), out or sys.stderr
        self._next = self._start + FIRST_LINE

    def __exit__(self, failed: object, *_: object) -> None:
        spent = self._clock() - self._start
        if failed is None and spent >= FIRST_LINE:
            self._say(f"{self._done:.0f} {self._unit}s in {duration(spent)}")

    def _show(self) -> None:
        now = self._clock()
        if now < self._next or self._done >= self.total:
            return
        self._next = now + NEXT_LINE
        spent = now - self._start
        left = spent * (self.total - self._done) / max(self._done, 1)
        count = f"{self._done:.0f} of {self.total} {self._unit}s"
        note = f", {self._note}" if self._note else ""
        self._say(f"{count}, {duration(spent)}, about {duration(left)} left{note}")

    def _say(self, text: str) -> None:
        print(f"{self._label}: {text}", file=self._out, flush=True)
