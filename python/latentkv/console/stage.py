"""What a part of a long job says of its steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

Self = TypeVar("Self", bound="Stage")


class Stage(ABC):
    """`total` steps of a kind; 0 until they are counted."""

    def __init__(self, total: int, label: str, unit: str) -> None:
        self.total = total
        self._label, self._unit, self._done, self._note = label, unit, 0.0, ""

    def __enter__(self: Self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, failed: object, *_: object) -> None: ...

    def update(self, n: int = 1) -> None:
        """`n` more steps are done."""
        self.reach(self._done + n)

    def reach(self, done: float) -> None:
        """So many of all are done."""
        self._done = done
        self._show()

    def note(self, text: str) -> None:
        """What is said beside the count with the next steps."""
        self._note = text

    @abstractmethod
    def _show(self) -> None: ...
