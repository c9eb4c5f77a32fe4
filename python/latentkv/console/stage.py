"""How a part of a long job reports its steps, and the bar of one on a terminal."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn

Self = TypeVar("Self", bound="Stage")


class Stage(ABC):
    """`total` steps of one kind; 0 until they are counted."""

    def __init__(self, total: int, label: str, unit: str) -> None:
        self.total = total
        self._label, self._unit, self._done, self._note = label, unit, 0.0, ""

    def __enter__(self: Self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, failed: object, *_: object) -> None: ...

    def update(self, n: int = 1) -> None:
        """Reports `n` more finished steps."""
        self.reach(self._done + n)

    def reach(self, done: float) -> None:
        """Reports how many steps are finished in all."""
        self._done = done
        self._show()

    def note(self, text: str) -> None:
        """Text that is shown beside the count from the next step on."""
        self._note = text

    @abstractmethod
    def _show(self) -> None: ...


def bar(screen: Console, wide: int, *columns: ProgressColumn) -> Progress:
    """One line that its owner redraws in place, removed at the end. It is short on a screen below `wide`
    columns, as a ^C is echoed after it."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24 if screen.width >= wide else 8),
        *columns,
        console=screen,
        speed_estimate_period=math.inf,  # steps may take minutes
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,  # it may be a file
    )
