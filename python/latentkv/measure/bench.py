"""Speed of prefill and decode at a given depth of the cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from latentkv import _core
from latentkv.plan.master import planned
from latentkv.plan.options import SessionOptions

SEQ = 0


@dataclass(frozen=True)
class Measurement:
    """One row of the table. `samples` are tokens per second, one per repetition."""

    kv: str
    test: str  # "pp" (prefill) or "tg" (decode)
    tokens: int
    depth: int
    threads: int  # 0: every physical core
    samples: list[float]
    kv_bytes: int  # allocated, for depth + the larger test
    kv_bytes_per_token: float
    rows_read: float  # compressed rows that a step has read by choice, of all layers (--kv-read); else 0
    implementations: dict[str, str]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.samples)

    @property
    def sd(self) -> float:
        return statistics.stdev(self.samples) if len(self.samples) > 1 else 0.0

    @property
    def name(self) -> str:
        return f"{self.test}{self.tokens}" + (f" @ d{self.depth}" if self.depth else "")

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "name": self.name, "mean": self.mean, "sd": self.sd}


def measure(
    model: _core.Model,
    kv: str,
    depth: int,
    *,
    prefill: int,
    decode: int,
    repetitions: int,
    options: SessionOptions | Mapping[str, Any],
    note: Callable[[str], None] = lambda text: None,
) -> Iterator[Measurement]:
    """Fills a fresh cache to `depth` through prefill, then times each test from there; a rewind follows each
    run.

    `kv` is a preset, a row format or K/V, as in q8/q4; `options` are the others of a session.
    One warm-up run per test.
    """
    name = kv or "file"
    options = planned(model, replace(SessionOptions.of(options), kv=kv))
    session = _core.Session(model, n_ctx=depth + max(prefill, decode, 1), **options)
    tokens = np.random.default_rng(0).integers(0, model.n_vocab, depth + max(prefill, decode)).tolist()
    if depth:
        note(f"filling {depth} tokens, {name}")
        session.decode(tokens[:depth], output="last")
    for test, count, step in (("pp", prefill, _prefill), ("tg", decode, _decode)):
        if not count:
            continue
        samples = []
        read = session.rows_read()
        for repetition in range(repetitions + 1):
            note(f"{test}{count} @ d{depth}, {name}, {repetition}/{repetitions}")
            begin = time.perf_counter()
            step(session, tokens[depth : depth + count])
            seconds = time.perf_counter() - begin
            if not session.seq_rm(SEQ, depth, -1):
                # layers with a sliding window have no rows of it any more
                session.clear()
                session.decode(tokens[:depth], output="last")
            if repetition:  # the first is the warm-up
                samples.append(count / seconds)
        bytes_of = session.kv_bytes()
        yield Measurement(
            kv,
            test,
            count,
            depth,
            options.n_threads,
            samples,
            bytes_of["total"],
            bytes_of["per_token"],
            (session.rows_read() - read) / (count * (repetitions + 1)),
            dict(session.implementations),
        )


def _prefill(session: _core.Session, tokens: Sequence[int]) -> None:
    session.decode(tokens, output="last")


def _decode(session: _core.Session, tokens: Sequence[int]) -> None:
    for token in tokens:
        session.decode([token], output="last")
