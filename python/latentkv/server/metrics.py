"""GET /metrics: Prometheus' text format, llama.cpp's names."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Annotated

from fastapi import APIRouter, Depends, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from latentkv.engine.counters import BOUNDS, Histogram
from latentkv.engine.scheduler import Scheduler
from latentkv.server.serving import Serving, serving_of

router = APIRouter()


@router.get("/metrics")
def metrics(serving: Annotated[Serving, Depends(serving_of)]) -> Response:
    registry = CollectorRegistry()
    registry.register(Seen(serving.engine.scheduler))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


class Seen(Collector):
    """Counters that are read one by one, so that a scrape does not wait for a step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    def collect(self) -> Iterator[Metric]:
        scheduler, counters = self.scheduler, self.scheduler.counters
        for name, what, value in (
            ("llamacpp:requests", "Requests that were given a slot", counters.requests),
            ("llamacpp:prompt_tokens", "Prompt tokens computed", counters.prompt_tokens),
            ("llamacpp:prompt_tokens_cached", "Prompt tokens found in the cache", counters.cached_tokens),
            ("llamacpp:prompt_seconds", "Time spent on prompts", counters.prompt_seconds),
            ("llamacpp:tokens_predicted", "Tokens generated", counters.predicted_tokens),
            ("llamacpp:tokens_predicted_seconds", "Time spent on answers", counters.predicted_seconds),
            ("llamacpp:n_decode", "Decode calls", counters.steps),
            ("llamacpp:n_tokens_max", "Tokens of the longest prompt with its answer", counters.longest),
        ):
            yield CounterMetricFamily(name, what, value=value)
        for name, what, seen in (
            ("latentkv:time_to_first_token_seconds", "From a request to it", counters.first_token),
            ("latentkv:time_per_output_token_seconds", "From one to the next", counters.next_token),
        ):
            yield HistogramMetricFamily(name, what, buckets=_buckets(seen), sum_value=seen.sum)
        for name, what, value in (
            (
                "llamacpp:prompt_tokens_seconds",
                "Prompt tokens a second, since the start",
                _over(counters.prompt_tokens, counters.prompt_seconds),
            ),
            (
                "llamacpp:predicted_tokens_seconds",
                "Answer tokens a second and answer, since the start",
                _over(counters.predicted_tokens, counters.predicted_seconds),
            ),
            (
                "llamacpp:n_busy_slots_per_decode",
                "Requests in a decode call, since the start",
                _over(counters.step_slots, counters.steps),
            ),
            ("llamacpp:requests_processing", "Requests in a slot", len(scheduler.running)),
            ("llamacpp:requests_deferred", "Requests that wait", len(scheduler.waiting)),
            ("llamacpp:kv_cache_tokens", "Tokens in the cache", scheduler.session.n_cells_used()),
            ("llamacpp:kv_cache_usage_ratio", "Share of its cells", self._usage()),
            (
                "latentkv:kv_cache_bytes",
                "Bytes of the cache, as allocated",
                scheduler.session.kv_bytes()["total"],
            ),
            *self._store(),
        ):
            yield GaugeMetricFamily(name, what, value=value)

    def _store(self) -> Iterator[tuple[str, str, int]]:
        store = self.scheduler.store
        if store is None:
            return
        yield "latentkv:store_ram_bytes", "Rows in memory of sequences that left the cache", store.ram_used
        yield "latentkv:store_disk_bytes", "The same in files", store.disk_used
        unshared = "Both, if no sequence shared its beginning with another"
        yield "latentkv:store_unshared_bytes", unshared, store.unshared

    def _usage(self) -> float:
        session = self.scheduler.session
        return session.n_cells_used() / session.n_ctx


def _buckets(seen: Histogram) -> list[tuple[str, float]]:
    """Upper bounds, each with how many values are at most as large."""
    counted = accumulate(seen.counts)
    return [(str(bound), count) for bound, count in zip((*BOUNDS, "+Inf"), counted, strict=True)]


def _over(count: float, whole: float) -> float:
    return count / whole if whole else 0.0
