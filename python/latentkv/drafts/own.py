"""Guesses of the model's own layers for further tokens (multi-token prediction, `--spec-type draft-mtp`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from latentkv import _core
from latentkv.drafts import judged
from latentkv.drafts.judged import Judged
from latentkv.drafts.worth import Step


class OwnLayers:
    """They read what the session reads, when it does (`mtp=True`), so that a guess costs one layer."""

    def __init__(self, session: Callable[[], _core.Session]) -> None:
        """session: the one that answers, which may be opened anew."""
        self._session, self.cost = session, session().guess_cost
        self._sequences = [Judged() for _ in range(session().n_seq_max)]

    def begin(self, seq: int) -> None:
        """Another answer: how often guesses come true is another's business."""
        self._sequences[seq] = Judged()

    def guesses(self, seq: int, tokens: Sequence[int], step: Step, most: int) -> list[int]:
        """What comes after all tokens of a sequence, as far as it is worth its place in the step, `most` at
        most. Nothing before the session has read all but the last of them."""
        of = self._sequences[seq]
        of.judge(tokens)
        count = step.worth(of.rate, min(most, _core.MTP_GUESSES), self.cost)
        session = self._session()
        if count == 0 or session.seq_pos_max(seq) != len(tokens) - 2:
            return []
        found = of.note(tokens, session.guess(seq, tokens[-1], count, judged.LEAST_SURE))
        step.add(len(found), of.rate)
        return found
