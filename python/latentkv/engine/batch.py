"""The tokens of one decode call, and whose they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from latentkv.engine.slot import Slot


@dataclass(frozen=True)
class Part:
    """`count` tokens of a slot, and guesses of what follows them, whose results are rows first … last - 1."""

    slot: Slot
    count: int
    first: int
    last: int
    guesses: Sequence[int] = ()

    @property
    def row(self) -> int:
        """What follows the last token that is no guess."""
        return self.last - 1 - len(self.guesses)


@dataclass
class Batch:
    """Tokens after their sequences, [n] each. embeds: they give hidden states, not logits. guessed: flags of
    tokens that are taken back where they come false."""

    embeds: bool = False
    tokens: list[int] = field(default_factory=list)
    seqs: list[int] = field(default_factory=list)
    output: list[bool] = field(default_factory=list)
    guessed: list[bool] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    n_rows: int = 0  # of logits, or of hidden states

    def add(self, slot: Slot, count: int, guesses: Sequence[int] = ()) -> None:
        """The next tokens that wait in a slot, `count` at most. guesses: behind all of them."""
        assert slot.job is not None
        part = slot.job.pending[:count]
        flags = slot.job.wanted(len(part)) + [True] * len(guesses)
        self.tokens += [*part, *guesses]
        self.seqs += [slot.seq] * len(flags)
        self.output += flags
        self.guessed += [False] * len(part) + [True] * len(guesses)
        self.parts.append(Part(slot, len(part), self.n_rows, self.n_rows + sum(flags), guesses))
        self.n_rows += sum(flags)
