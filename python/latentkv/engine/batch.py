"""The tokens of one decode call, and whose they are."""

from __future__ import annotations

from dataclasses import dataclass, field

from latentkv.engine.slot import Slot


@dataclass(frozen=True)
class Part:
    """`count` tokens of a slot, whose results are rows first … last - 1."""

    slot: Slot
    count: int
    first: int
    last: int


@dataclass
class Batch:
    """Tokens after their sequences, [n] each. embeds: they give hidden states, not logits."""

    embeds: bool = False
    tokens: list[int] = field(default_factory=list)
    seqs: list[int] = field(default_factory=list)
    output: list[bool] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    n_rows: int = 0  # of logits, or of hidden states

    def add(self, slot: Slot, count: int) -> None:
        assert slot.job is not None
        if slot.job.has_read:  # one token of an answer
            self.tokens.append(slot.job.pending[0])
            self.seqs.append(slot.seq)
            self.output.append(True)
            self.parts.append(Part(slot, 1, self.n_rows, self.n_rows + 1))
            self.n_rows += 1
            return
        part = slot.job.pending[:count]
        self.tokens += part
        self.seqs += [slot.seq] * len(part)
        flags = slot.job.wanted(len(part))
        self.output += flags
        self.parts.append(Part(slot, len(part), self.n_rows, self.n_rows + sum(flags)))
        self.n_rows += sum(flags)
