"""Guesses of answers that are being written."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from latentkv.drafts.lookup import Lookup
from latentkv.drafts.past import Past
from latentkv.drafts.worth import CPU, GPU, MOST, Step, on_gpu
from latentkv.engine.slot import Job, Slot

if TYPE_CHECKING:
    from latentkv import _core
    from latentkv.drafts.model import Drafter
    from latentkv.drafts.own import OwnLayers


class Drafting:
    """Prompt lookup over each sequence and over earlier answers; where that finds nothing, a smaller model,
    or the model's own layers for further tokens.

    Steps of several sequences with several tokens each are not measured on a GPU yet: there an answer drafts
    that is written alone.
    """

    def __init__(
        self, most: int = MOST, on_gpu: bool = False, model: Drafter | OwnLayers | None = None
    ) -> None:
        """most: guesses of a step, of one answer."""
        self.most, self.on_gpu, self.model = most, on_gpu, model
        self._past = Past()

    @classmethod
    def of(
        cls, session: _core.Session, most: int = MOST, model: Drafter | OwnLayers | None = None
    ) -> Drafting | None:
        """None: nothing is drafted. What goes under eviction is chosen by all tokens, guesses among them."""
        return cls(most, on_gpu(session), model) if most > 0 and session.evict == "none" else None

    def step(self, n_answers: int) -> Step | None:
        """A step in which so many answers get a token; None: they get no more."""
        return None if self.on_gpu and n_answers > 1 else Step(n_answers, GPU if self.on_gpu else CPU)

    def guesses(self, slot: Slot, step: Step) -> list[int]:
        """Tokens behind those that wait. The answer's limit is not reached in the step: it may be raised
        before it is."""
        job = slot.job
        assert job is not None
        most = min(self.most, job.writer.left - 2)
        if most < 1:
            return []
        if job.lookup is None:
            tokens = [*job.ticket.request.prompt, *job.writer.tokens]
            job.lookup = Lookup(tokens, self._past.of(job.ticket.request.salt))
            if self.model is not None:
                self.model.begin(slot.seq)
        try:
            return job.lookup.guesses_or(self.model, slot.seq, step, most)
        except Exception as error:  # no answer needs guesses
            print(
                f"warning: [-md] expected guesses; got {error}; there are none from now on", file=sys.stderr
            )
            self.model = None
            return []

    def finish(self, job: Job) -> None:
        """An answer has ended."""
        self._past.add(job.ticket.request.salt, job.writer.tokens)
