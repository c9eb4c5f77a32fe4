"""Guesses of a model with recurrent layers: it goes back to a state before them, and computes what came true
once more."""

from __future__ import annotations

from typing import Any

import asking
import pytest
from hybrid_files import Hybrid, write

from latentkv import _core
from latentkv.drafts.worth import Step
from latentkv.engine.drafting import Drafting
from latentkv.engine.request import Request, Ticket
from latentkv.engine.scheduler import Scheduler
from latentkv.engine.slot import Slot
from latentkv.sampling.options import SamplingOptions


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    return write(tmp_path_factory.mktemp("hybrid") / "model.gguf")


PROMPTS = [list(range(7, 47)) * 3, [11, 12, 13] * 20, list(range(3, 60))]


class Told(Drafting):
    """Guesses of answers that are known, of which each time another number comes true."""

    def __init__(self, known: list[list[int]]) -> None:
        super().__init__()
        self._known = dict(zip(map(tuple, PROMPTS), known, strict=True))

    def guesses(self, slot: Slot, step: Step) -> list[int]:
        job = slot.job
        assert job is not None
        at = len(job.writer.tokens)
        right = at % 7
        known = self._known[tuple(job.ticket.request.prompt)][at:]
        return [*known[:right], *([1, 2, 3] if right < 6 else [])][: max(0, job.writer.left - 2)]


def answers(model: Any, drafting: Drafting | None, n_guesses: int) -> tuple[list[list[int]], Scheduler]:
    cache = {"kv": "f32", "n_ctx": 4096, "n_threads": 1, "n_guesses": n_guesses}
    one = Scheduler(model, _core.Session(model, n_seq_max=3, **cache), drafting=drafting)
    greedy = SamplingOptions(temperature=0)
    tickets = [Ticket(Request(prompt, greedy, 80, ignore_eos=True)) for prompt in PROMPTS]
    asking.run(one, *tickets)
    assert asking.are_whole(one)
    return [list(ticket.progress.tokens) for ticket in tickets], one


@pytest.mark.parametrize("n_guesses", [0, 4, 15])
def test_answers_are_those_without_guesses(hybrid: Hybrid, n_guesses: int) -> None:
    model = _core.Model(str(hybrid.path))
    want, plain = answers(model, None, 0)
    got, one = answers(model, Told(want), n_guesses)
    assert got == want
    assert one.counters.accepted_tokens > 60
    assert one.counters.steps < 0.6 * plain.counters.steps
