"""Answers that were written before, for whoever is asked for the like again."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from latentkv.drafts.text import SIZES, Text

MOST = 16  # answers
TOKENS = 1 << 16  # of all of them


class Past:
    """The latest answers of a server. A salt keeps its answers from other ones'."""

    def __init__(self) -> None:
        self._answers: deque[tuple[str, Text]] = deque()

    def add(self, salt: str, tokens: Sequence[int]) -> None:
        if len(tokens) <= SIZES[0]:
            return
        self._answers.appendleft((salt, Text(tokens)))
        while len(self._answers) > MOST or sum(len(text) for _, text in self._answers) > TOKENS:
            self._answers.pop()

    def of(self, salt: str) -> list[Text]:
        """Those of a salt, the latest first."""
        return [text for own, text in self._answers if own == salt]
