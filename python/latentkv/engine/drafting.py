"""Guesses of answers that are being written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from latentkv.drafts.lookup import Lookup
from latentkv.drafts.past import Past
from latentkv.drafts.worth import CPU, GPU, MOST, Step, on_gpu
from latentkv.engine.slot import Job

if TYPE_CHECKING:
    from latentkv import _core


class Drafting:
    """Prompt lookup over each sequence and over earlier answers.

    Steps of several sequences with several tokens each are not measured on a GPU yet: there an answer drafts
    that is written alone.
    """

    def __init__(self, most: int = MOST, on_gpu: bool = False) -> None:
        """most: guesses of a step, of one answer."""
        self.most, self.on_gpu = most, on_gpu
        self._past = Past()

    @classmethod
    def of(cls, session: _core.Session, most: int = MOST) -> Drafting | None:
        """None: nothing is drafted. What goes under eviction is chosen by all tokens, guesses among them."""
        return cls(most, on_gpu(session)) if most > 0 and session.evict == "none" else None

    def step(self, n_answers: int) -> Step | None:
        """A step in which so many answers get a token; None: they get no more."""
        return None if self.on_gpu and n_answers > 1 else Step(n_answers, GPU if self.on_gpu else CPU)

    def guesses(self, job: Job, step: Step) -> list[int]:
        """Tokens behind those that wait. The answer's limit is not reached in the step: it may be raised
        before it is."""
        most = min(self.most, job.writer.left - 2)
        if most < 1:
            return []
        if job.lookup is None:
            tokens = [*job.ticket.request.prompt, *job.writer.tokens]
            job.lookup = Lookup(tokens, self._past.of(job.ticket.request.salt))
        return job.lookup.guesses(step, most)

    def finish(self, job: Job) -> None:
        """An answer has ended."""
        self._past.add(job.ticket.request.salt, job.writer.tokens)
