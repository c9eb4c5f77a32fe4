"""Seconds to a first token and between tokens, as /metrics shows them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from asking import asked, run, scheduler

from latentkv.engine.counters import BOUNDS, Histogram


@pytest.fixture(scope="module")
def model(converted: Callable[..., Path]) -> Any:
    from latentkv import _core

    return _core.Model(str(converted("--method", "none", "--outtype", "f32")))


def test_values_are_counted_where_they_belong() -> None:
    seen = Histogram()
    for value in (0.0, 0.001, 0.0011, 499.0, 501.0):
        seen.add(value)
    assert seen.counts == [2, 1, *[0] * (len(BOUNDS) - 3), 1, 1]
    assert seen.sum == pytest.approx(1000.0021)


def test_each_answer_has_a_first_token_and_the_others_a_gap(model: Any) -> None:
    served = scheduler(model, 2)
    run(served, *(asked(model, text, limit) for text, limit in (("The clerk", 5), ("A river", 9), ("X", 1))))
    counters = served.counters
    assert (sum(counters.first_token.counts), sum(counters.next_token.counts)) == (3, 4 + 8)
    assert 0 < counters.next_token.sum < counters.first_token.sum + counters.predicted_seconds


def test_waiting_counts(model: Any) -> None:
    served = scheduler(model, 1)
    ticket = asked(model, "The clerk", 1)
    time.sleep(0.2)
    run(served, ticket)
    assert 0.2 < served.counters.first_token.sum < 5


def test_a_scrape_shows_them(http: Any) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    for length in (3, 4):
        body = {"prompt": "The clerk", "max_tokens": length, "ignore_eos": True}
        assert http.post("/v1/completions", json=body).status_code == 200
    found = {each.name: each for each in text_string_to_metric_families(http.get("/metrics").text)}
    for name, least in (("time_to_first_token", 2), ("time_per_output_token", 5)):
        family = found[f"latentkv:{name}_seconds"]
        assert family.type == "histogram"
        samples = {sample.name.rpartition("_")[2]: sample.value for sample in family.samples}
        buckets = [sample.value for sample in family.samples if sample.name.endswith("_bucket")]
        assert len(buckets) == len(BOUNDS) + 1
        assert buckets == sorted(buckets)
        assert buckets[-1] == samples["count"] >= least
        assert samples["sum"] > 0
