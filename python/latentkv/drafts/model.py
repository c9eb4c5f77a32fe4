"""Guesses of a smaller model with the same vocabulary (`-md`).

Speculative decoding (Leviathan et al. 2023) with the smaller model's likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from latentkv import _core
from latentkv.drafts import judged
from latentkv.drafts.judged import Judged
from latentkv.drafts.worth import Step
from latentkv.errors import LatentKVError, expected
from latentkv.session.prefix import common

PIECE = 512  # tokens of a long text that it reads before a step, so that no other answer waits for it
PADDED = 1024  # tokens by which padded embeddings may differ


@dataclass
class _Sequence(Judged):
    held: list[int] = field(default_factory=list)  # what its cache has


class Drafter:
    """A model beside the one that answers, with a cache of as many sequences."""

    def __init__(self, session: _core.Session, cost: float) -> None:
        """cost: of one of its tokens, in steps of the other model."""
        self.session, self.cost = session, cost
        self._sequences = [_Sequence() for _ in range(session.n_seq_max)]

    @classmethod
    def of(cls, model: _core.Model, session: _core.Session, target: _core.Model) -> Drafter:
        """session: of the model.

        Raises:
            LatentKVError: it has another vocabulary, or cannot take guesses back.
        """
        require_same_vocabulary(model, target)
        if session.is_recurrent or not session.rewinds:
            raise expected("-md", "a model whose cache can go back by single tokens", "one that cannot")
        return cls(session, model.size_bytes / target.size_bytes)

    def begin(self, seq: int) -> None:
        """Another answer: how often guesses come true is another's business."""
        self._sequences[seq] = _Sequence(held=self._sequences[seq].held)

    def guesses(self, seq: int, tokens: Sequence[int], step: Step, most: int) -> list[int]:
        """What comes after all tokens of a sequence, as far as it is worth its place in the step, `most` at
        most. Nothing while it has not read them all."""
        of = self._sequences[seq]
        of.judge(tokens)
        if len(tokens) + most > self.session.n_ctx:
            return []
        count = step.worth(of.rate, most, self.cost)
        if count == 0 or (logits := self._read(seq, tokens)) is None:
            return []
        found: list[int] = []
        while len(found) < count:
            token = int(logits.argmax())
            if 1 / float(np.exp(logits - logits[token], dtype=np.float64).sum()) < judged.LEAST_SURE:
                break
            found.append(token)
            if len(found) < count:
                logits = self._decode([token], seq)
        found = of.note(tokens, found)
        step.add(len(found), of.rate)
        return found

    def _read(self, seq: int, tokens: Sequence[int]) -> np.ndarray[Any, Any] | None:
        """Logits behind the tokens; None: some are not read yet."""
        of = self._sequences[seq]
        keep = min(common(of.held, tokens), len(tokens) - 1)
        if keep < len(of.held):
            if self.session.seq_rm(seq, keep):
                del of.held[keep:]
            else:
                self._forget(seq)
                keep = 0
        missing = list(tokens[keep : keep + PIECE])
        logits = self._decode(missing, seq)
        return logits if len(of.held) == len(tokens) else None

    def _decode(self, tokens: list[int], seq: int) -> np.ndarray[Any, Any]:
        """Logits behind the last one. Other sequences are forgotten where there is no room beside them."""
        try:
            self.session.require_room(len(tokens))
        except LatentKVError:
            for other in range(len(self._sequences)):
                if other != seq:
                    self._forget(other)
        try:
            logits = self.session.decode(tokens, seq=[seq] * len(tokens), output="last")[0]
        except BaseException:  # of an interrupted call some tokens may be there
            self._forget(seq)
            raise
        self._sequences[seq].held += tokens
        return logits

    def _forget(self, seq: int) -> None:
        self.session.seq_rm(seq)
        self._sequences[seq].held = []


def require_same_vocabulary(model: _core.Model, target: _core.Model) -> None:
    """Tokens of one are tokens of the other. Embeddings may be padded.

    Raises:
        LatentKVError: they differ.
    """
    for token in range(min(model.n_vocab, target.n_vocab)):
        own, other = model.token_to_piece(token, True), target.token_to_piece(token, True)
        if own != other:
            got = f"token {token} is {own!r}, not {other!r}"
            raise expected("-md", "a model with the same vocabulary", got)
    if abs(model.n_vocab - target.n_vocab) > PADDED:
        raise expected("-md", f"a vocabulary of {target.n_vocab} tokens", model.n_vocab)
