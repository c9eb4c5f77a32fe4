"""Tokens that stand further on in a sequence, moved to where a prompt has them: `--cache-reuse`, as
llama.cpp's server has it. A conversation whose beginning was cut out keeps the rest.

A moved row keeps its content: it was computed after the tokens that are gone. So logits differ from those
of a prompt that is computed anew, and nothing from the first moved token on is lent, stored, or taken for a
beginning.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from latentkv.engine.shift import require_all_tokens, require_movable_keys
from latentkv.errors import expected
from latentkv.session.prefix import common

if TYPE_CHECKING:
    from latentkv import _core


@dataclass(frozen=True)
class Move:
    """`count` tokens of a sequence from `first` on, which a prompt has from `to` on."""

    first: int
    to: int
    count: int


@dataclass(frozen=True)
class Reuse:
    """`least`: tokens of a chunk that is worth a move. `sink`: first tokens whose rows have a region of their
    own, which none can enter later."""

    least: int
    sink: int = 0

    @staticmethod
    def of(model: _core.Model, session: _core.Session, least: int, sink: int) -> Reuse:
        """Raises LatentKVError where rows cannot move."""
        require_movable_keys("--cache-reuse", model)
        require_all_tokens("--cache-reuse", session)
        if session.prefill == "lazy":
            got = "lazy, by which a prompt is exact from its first token or not at all"
            raise expected("--cache-reuse", "eager prefill", got, "leave one out")
        return Reuse(least, sink)

    def moves(self, cached: Sequence[int], prompt: Sequence[int], start: int, lent: int = 0) -> list[Move]:
        """What a prompt that begins with `start` cached tokens has more of: chunks in the order of both, at
        most all of the prompt but one. Each is the first that fits. The first `lent` cached tokens stay where
        they are."""
        if start < self.sink:
            return []
        found: list[Move] = []
        wanted, there = _bytes(prompt[: len(prompt) - 1]), _bytes(cached)
        at, to = start, start
        while len(chunk := wanted[4 * to : 4 * (to + self.least)]) == 4 * self.least:
            at = _find(there, chunk, at)
            if 0 <= at < lent and at != to:
                at = _find(there, chunk, lent)
            if at < 0:
                break
            count = common(cached[at:], prompt[to : len(prompt) - 1])
            found.append(Move(at, to, count))
            at, to = at + count, to + count
        return found

    def kept(self, moves: Sequence[Move], n_cached: int, n_recent: Callable[[int], int]) -> int:
        """How many tokens a prompt can go on from after these moves. As in prefix.kept(), those that were
        compressed when others followed them are computed anew. n_recent: Session's."""
        end = moves[-1].to + moves[-1].count
        if moves[-1].first + moves[-1].count == n_cached:
            return end
        return max(0, end - n_recent(end))


def _bytes(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def _find(there: bytes, chunk: bytes, start: int) -> int:
    """The first token from `start` on where a chunk is, -1: nowhere. Both of 4 bytes a token."""
    at = there.find(chunk, 4 * start)
    while at >= 0 and at % 4:
        at = there.find(chunk, at + 1)
    return at // 4 if at >= 0 else -1
