"""Progress of a job of several stages, in one line on standard error: the current stage, the share that is
done, and the time that is left. Each stage counts by its expected cost."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.progress import TextColumn

from latentkv.console import terminal
from latentkv.console.durations import duration
from latentkv.console.stage import Stage, bar

LINE = 10.0  # seconds between two lines of a log or a pipe
_REDRAW = 0.5  # seconds, on a terminal
_KNOWN = 0.01  # of the whole: what is left is not said before
_TRUST = 0.3  # of the whole: as much as an expectation in seconds counts beside what was seen

current: Whole | None = None


@dataclass
class Step:
    label: str  # what is done in it; neighbours with the same words are one stage
    cost: float  # in any unit
    entered: bool = False
    open: bool = False  # it was announced, and no part of it has begun
    done: float = 0.0  # share


class Whole:
    """`with Whole([("reading", 1), ("writing", 20)]):` makes every `progress.stage` inside a part of it. A
    thread of its own says how far it is, also while nothing moves. Stages that are never entered were not
    necessary, and are not counted once a later one begins. in_seconds: costs are what they are expected to
    take, which what is left follows until the job itself says otherwise."""

    def __init__(
        self,
        steps: Sequence[tuple[str, float]],
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        in_seconds: bool = False,
    ) -> None:
        self._in_seconds = in_seconds
        self._steps = [Step(label, cost) for label, cost in steps]
        self._at, self._reached = 0, 0.0
        self._clock, self._start, self._note = clock, clock(), ""
        self._lock, self._ended = threading.RLock(), threading.Event()
        screen = terminal.console(out or sys.stderr)
        times = TextColumn("{task.fields[times]}", markup=False)
        self._drawn = bar(screen, 100, times) if terminal.has_width(screen) else None
        self._out = out or sys.stderr
        self._task = None if self._drawn is None else self._drawn.add_task("", total=1.0, times="")

    def __enter__(self) -> Whole:
        global current
        current = self
        if self._drawn is not None:
            self._drawn.start()
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        global current
        current = None
        self._ended.set()
        with self._lock:
            if self._drawn is not None:
                self._drawn.stop()
            elif failed is None and self._spent() >= LINE:
                print(f"done in {duration(self._spent())}", file=self._out, flush=True)

    def begin(self, label: str) -> None:
        """Enters a stage whose parts are not counted."""
        with self._lock:
            self._enter(label).open = True

    def part(self, total: int, label: str, unit: str, of: int | None = None) -> Part:
        """Enters a stage, or its next part. After the last part, further calls add to that one."""
        with self._lock:
            step = self._enter(label)
            step.open = False
            step.cost *= total / of if of else 1.0
        return Part(self, step, total, unit)

    def line(self) -> str:
        """`stage 2 of 6, reading keys: 38 % of all, 41 s, about 3.1 min left`"""
        labels = list(dict.fromkeys(step.label for step in self._steps))
        label = self._steps[self._at].label
        note = f", {self._note}" if self._note else ""
        return f"stage {labels.index(label) + 1} of {len(labels)}, {label}: {self._times()}{note}"

    def note(self, text: str) -> None:
        self._note = text

    def _enter(self, label: str) -> Step:
        current = self._steps[self._at]
        if current.label == label and current.open:
            return current
        if current.entered:
            current.done, current.open = 1.0, False
        left = (i for i, step in enumerate(self._steps) if step.label == label and not step.entered)
        at = next(left, None)
        if at is None:
            same = [i for i, step in enumerate(self._steps) if step.label == label]
            at = (same[-1] if same else self._at) + 1
            cost = self._steps[at - 1].cost
            self._steps.insert(at, Step(label, cost))
        for step in self._steps[:at]:
            step.cost = step.cost if step.entered else 0.0
        self._at = at
        self._steps[at].entered = True
        return self._steps[at]

    def _spent(self) -> float:
        return self._clock() - self._start

    def share(self) -> float:
        """The share of the whole that is done. It does not fall when more turns out to be necessary."""
        whole = sum(step.cost for step in self._steps)
        done = sum(step.cost * min(step.done, 1.0) for step in self._steps if step.entered)
        self._reached = max(self._reached, done / (whole or 1.0))
        return self._reached

    def _times(self) -> str:
        spent, share = self._spent(), self.share()
        if (share < _KNOWN or spent < 1) and not self._in_seconds:
            return duration(spent)
        left = self._left(spent, share)
        return f"{100 * share:.0f} % of all, {duration(spent)}, about {duration(left)} left"

    def _left(self, spent: float, share: float) -> float:
        if not self._in_seconds:
            return spent * (1 - share) / share
        whole = sum(step.cost for step in self._steps)
        pace = (_TRUST * whole + spent) / ((_TRUST + share) * whole or 1.0)
        return whole * (1 - share) * pace

    def _beat(self) -> None:
        while not self._ended.wait(LINE if self._drawn is None else _REDRAW):
            with self._lock:
                if not self._ended.is_set():
                    self.show()

    def show(self) -> None:
        if self._drawn is None or self._task is None:
            print(self.line(), file=self._out, flush=True)
            return
        where, _, times = self.line().partition(": ")
        self._drawn.update(self._task, completed=self.share(), description=where, times=times, refresh=True)


class Part(Stage):
    """The steps of one stage of a Whole."""

    def __init__(self, whole: Whole, step: Step, total: int, unit: str) -> None:
        super().__init__(total, step.label, unit)
        self._whole, self._step = whole, step

    def __exit__(self, failed: object, *_: object) -> None:
        if failed is None:
            self._step.done = 1.0
            self._whole.note("")

    def note(self, text: str) -> None:
        self._whole.note(text)

    def _show(self) -> None:
        self._step.done = self._done / max(self.total, 1)
