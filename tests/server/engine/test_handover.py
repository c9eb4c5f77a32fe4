"""What a step has for its listeners is handed over once, when the step is done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from asking import GREEDY, scheduler

from latentkv.engine.engine import Engine
from latentkv.engine.outbox import Item, Outbox
from latentkv.engine.request import Request, Ticket
from latentkv.generate.writer import Piece
from latentkv.server.answering import Answering, Inbox, wholes


@pytest.fixture(scope="module")
def model(converted: Callable[..., Path]) -> Any:
    from latentkv import _core

    return _core.Model(str(converted("--method", "none", "--outtype", "f32")))


def asked(model: Any) -> Request:
    return Request(model.tokenize(b"The clerk"), GREEDY, 12, ignore_eos=True)


def test_once_a_step(model: Any) -> None:
    steps = scheduler(model, 4)
    came: list[Sequence[Item]] = []
    tickets = [Ticket(asked(model), lambda piece: None, came.append) for _ in range(4)]
    for ticket in tickets:
        steps.submit(ticket)
    n_steps = 0
    while steps.step():
        n_steps += 1
        assert not came or len(came) < n_steps
        steps.outbox.flush()
    assert len(came) <= n_steps
    assert max(len(items) for items in came) == 4
    ends = [piece.finish_reason for items in came for _, piece in items if piece is not None]
    assert ends.count("length") == 4


def test_who_is_gone_is_no_matter_of_others(model: Any) -> None:
    outbox, came = Outbox(), []
    gone, there = (Ticket(asked(model), deliver=each) for each in (lambda items: [][1], came.append))
    for ticket in (gone, there):
        ticket.put(Piece("x"), outbox)
    outbox.flush()
    assert (gone.cancelled, there.cancelled, len(came)) == (True, False, 1)
    outbox.flush()
    assert len(came) == 1


def test_answers_of_one_response_share_an_inbox(model: Any) -> None:
    async def read(engine: Engine) -> list[list[Piece]]:
        inbox = Inbox()
        answers = [Answering(engine, asked(model), inbox, index) for index in range(3)]
        return await wholes(answers, inbox)

    with Engine(scheduler(model, 2)) as engine:
        texts = ["".join(piece.text for piece in pieces) for pieces in asyncio.run(read(engine))]
        alone = "".join(piece.text for piece in engine.submit(asked(model)))
    assert texts == [alone] * 3
