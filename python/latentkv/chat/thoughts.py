"""How long a model may think before it answers: llama.cpp's reasoning budget.

A thought that has used up its tokens is closed: what comes next is a line that says so, and the text by which
the template ends thoughts. The line is the model's last thought, and the answer goes on from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from latentkv.text import Utf8Stream, utf8

if TYPE_CHECKING:
    from latentkv import _core

CLOSING = "\n\nThat is as long as I may think; I answer now.\n"
_CERTAIN = 1e9  # above all other logits, at any temperature


@dataclass(frozen=True)
class ThoughtTags:
    """Texts between which thoughts stand; any of `ends` ends one. is_open: the prompt ends within one."""

    start: str
    ends: Sequence[str]
    is_open: bool

    @staticmethod
    def of(written: Mapping[str, Any]) -> ThoughtTags | None:
        """written: what ChatTemplates.apply() returns. None: no thoughts are told from answers."""
        start, begun = written["thinking_start_tag"], written["generation_prompt"]
        ends = [end for end in written["thinking_end_tags"] if end]
        if not start or not ends:
            return None
        return ThoughtTags(start, ends, begun.rfind(start) > max(begun.rfind(end) for end in ends))


@dataclass(frozen=True)
class ThoughtLimit:
    """budget: tokens that a thought may have; closing: the line after them, if they are not 0."""

    tags: ThoughtTags
    budget: int
    closing: str = CLOSING

    @staticmethod
    def of(tags: ThoughtTags | None, budget: int | None, closing: str | None = None) -> ThoughtLimit | None:
        """None where there is nothing to limit. budget: None or -1 are no limit; closing: None is the usual
        one."""
        if tags is None or budget is None or budget < 0:
            return None
        return ThoughtLimit(tags, budget, CLOSING if closing is None else closing)


def thinking_kwargs(given: Mapping[str, Any] | None, budget: int | None) -> Mapping[str, Any] | None:
    """Variables of the template: without tokens to think, it is told so, where it is not told otherwise."""
    return {"enable_thinking": False, **(given or {})} if budget == 0 else given


class ThoughtCloser:
    """Follows one answer token by token, and closes its thoughts."""

    def __init__(self, model: _core.Model, limit: ThoughtLimit) -> None:
        self._model, self._budget = model, limit.budget
        self._start, self._ends = limit.tags.start.encode(), [end.encode() for end in limit.tags.ends]
        line = model.tokenize(utf8(limit.closing, "reasoning_budget_message"), False, False)
        end = model.tokenize(self._ends[0], False, True)
        self._close = [*(line if self._budget else ()), *end]
        self._due: list[int] = []  # tokens that come next
        self._left: int | None = None  # tokens that the thought may still have; None: there is none
        self._tail, self._utf8 = b"", Utf8Stream()
        if limit.tags.is_open:
            self._open()

    @property
    def forces(self) -> bool:
        """Whether it says which token comes next."""
        return bool(self._due)

    def applied(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """The logits [n_vocab] of the next token, which it says. A grammar may still not let it come."""
        changed = logits.copy()
        changed[self._due[0]] = _CERTAIN
        return changed

    def push(self, token: int) -> None:
        """Tells it the next token of the answer."""
        if self._due:
            is_as_said = token == self._due.pop(0)
            if not is_as_said or not self._due:
                self._over()
            return
        piece = self._model.token_to_piece(token, True)
        self._utf8.push(piece)
        self._tail += piece
        if self._left is None:
            if self._start in self._tail:
                self._open()
        elif any(end in self._tail for end in self._ends):
            self._over()
        else:
            self._left -= 1
            self._close_if_used_up()
        self._tail = self._tail[-max(map(len, (self._start, *self._ends))) :]

    def _open(self) -> None:
        self._left, self._tail = self._budget, b""
        self._close_if_used_up()

    def _close_if_used_up(self) -> None:
        if self._left is not None and self._left <= 0 and self._utf8.is_whole:
            self._due = list(self._close)

    def _over(self) -> None:
        self._due, self._left, self._tail = [], None, b""
