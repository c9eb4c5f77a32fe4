"""How far a stage is, on standard error: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from .errors import need

FIRST_LINE = 10.0  # seconds into a stage; shorter ones say nothing
NEXT_LINE = 30.0


def bar(total: int, label: str, unit: str = "layer") -> Any:
    """A context manager with update(n) and set_postfix(name=text)."""
    if not sys.stderr.isatty():
        return Lines(total, label, unit)
    return need("tqdm").tqdm(total=total, desc=label, unit=unit, leave=False, dynamic_ncols=True)


class Lines:
    """`calibrate: 120 of 960 windows, 41 s, about 4.8 min left`, for logs and pipes."""

    def __init__(
        self,
        total: int,
        label: str,
        unit: str,
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._label, self._unit, self._clock = total, label, unit, clock
        self._out = out or sys.stderr
        self._done, self._start, self._note = 0, clock(), ""
        self._next = self._start + FIRST_LINE

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        spent = self._clock() - self._start
        if failed is None and spent >= FIRST_LINE:
            self._say(f"{self._done} {self._unit}s in {duration(spent)}")

    def update(self, n: int = 1) -> None:
        self._done += n
        now = self._clock()
        if now < self._next or self._done >= self._total:
            return
        self._next = now + NEXT_LINE
        spent = now - self._start
        left = spent * (self._total - self._done) / max(self._done, 1)
        count = f"{self._done} of {self._total} {self._unit}s"
        self._say(f"{count}, {duration(spent)}, about {duration(left)} left{self._note}")

    def set_postfix(self, refresh: bool = True, **facts: str) -> None:
        """What the next lines say besides, as tqdm has it."""
        self._note = "".join(f", {name} {value}" for name, value in facts.items())

    def _say(self, text: str) -> None:
        print(f"{self._label}: {text}", file=self._out, flush=True)


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
