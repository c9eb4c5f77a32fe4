"""Requests to a scheduler that no thread runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from latentkv.engine.request import Request, Ticket
from latentkv.engine.scheduler import Scheduler
from latentkv.sampling.options import SamplingOptions

GREEDY = SamplingOptions(temperature=0)
TEXT = (Path(__file__).parents[2] / "models" / "demo" / "sample-calib.txt").read_text(encoding="utf-8")
WORDS = tuple(TEXT[at : at + 40] for at in range(1000, 9000, 1000))


def scheduler(model: Any, n_seq: int, n_ctx: int = 1024, **options: Any) -> Scheduler:
    from latentkv import _core

    cache = {"kv": "f32", "n_threads": 1, **options.pop("cache", {})}
    session = _core.Session(model, n_ctx=n_ctx, n_seq_max=n_seq, **cache)
    return Scheduler(model, session, **options)


def asked(model: Any, text: str, limit: int = 12, **options: Any) -> Ticket:
    given = {"sampling": GREEDY, "ignore_eos": True} | options
    return Ticket(Request(model.tokenize(text.encode()), max_tokens=limit, **given))


def are_whole(scheduler: Scheduler) -> bool:
    """Whether each sequence of the cache is as long as its slot says."""
    return all(len(slot.tokens) == scheduler.session.seq_pos_max(slot.seq) + 1 for slot in scheduler.slots)


def run(scheduler: Scheduler, *tickets: Ticket) -> list[str]:
    for ticket in tickets:
        scheduler.check(ticket)
        scheduler.submit(ticket)
    while scheduler.step():
        pass
    return ["".join(piece.text for piece in ticket) for ticket in tickets]
