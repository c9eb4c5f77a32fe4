"""Guesses that a text repeats itself: what followed the last few tokens before.

Prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from latentkv.drafts.text import LONGEST, Text
from latentkv.drafts.worth import Acceptance, Step

if TYPE_CHECKING:
    from latentkv.drafts.model import Drafter
    from latentkv.drafts.own import OwnLayers


class Lookup:
    """Guesses for one sequence. It follows a passage as long as that goes on, and else looks for another."""

    def __init__(self, tokens: Sequence[int], others: Sequence[Text] = ()) -> None:
        """tokens: of the sequence so far. others: texts beside it, the likeliest first."""
        self.text = Text(tokens)
        self._others = others
        self._acceptance = Acceptance()
        self._source: Text | None = None
        self._next = 0  # position in the source of what comes next
        self._length = 0  # tokens before it that are the sequence's last ones

    def push(self, token: int) -> None:
        """The sequence's next token."""
        source, self._source = self._source, None
        if source is not None and self._next < len(source):
            is_right = source.tokens[self._next] == token
            self._acceptance.add(self._length, is_right)
            self._next, self._length = self._next + 1, min(self._length + 1, LONGEST)
            self._source = source if is_right else None
        self.text.append(token)

    def guesses(self, step: Step, most: int) -> list[int]:
        """What comes next, as many tokens of it as are worth their place in the step, `most` at most."""
        if self._source is None:
            self._look()
        if self._source is None:
            return []
        left = self._source.tokens[self._next : self._next + most]
        return left[: step.count(self._acceptance.rate(self._length), len(left))]

    def guesses_or(self, model: Drafter | OwnLayers | None, seq: int, step: Step, most: int) -> list[int]:
        """The same; where the text repeats nothing, what a model guesses behind its sequence."""
        found = self.guesses(step, most)
        return found if found or model is None else model.guesses(seq, self.text.tokens, step, most)

    def _look(self) -> None:
        tail, self._length = self.text.tokens[-LONGEST:], 0
        for source in chain((self.text,), self._others):
            for end in source.ends_of(tail):
                if (length := source.matched(tail, end)) > self._length or self._source is None:
                    self._source, self._next, self._length = source, end, length
            if self._source is not None:
                return
