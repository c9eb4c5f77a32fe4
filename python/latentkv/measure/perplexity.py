"""Perplexity of a model with a given cache, and its divergence from another cache, in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentkv import _core, ranges
from latentkv.errors import expected
from latentkv.measure.divergence import Scores, by_depth, concatenate, score, summary
from latentkv.measure.windows import WINDOWS, Windows
from latentkv.plan.master import planned
from latentkv.plan.options import SessionOptions
from latentkv.text import utf8

FLOOR_WINDOWS = 8
SLICE = 512  # tokens that are scored together, of all windows
_LOGITS_BYTES = 128 << 20  # one slice's logits, per cache: bounds memory for large vocabularies


@dataclass(frozen=True)
class Cache:
    """A model with options of a session, but its sizes (kv, kv_k, kv_v, kv_budget, sink, recent, …).

    Prefill is eager unless they ask for lazy, whatever the file says: a lazily prefilled token is scored as
    without compression.
    """

    model: _core.Model
    options: SessionOptions | Mapping[str, Any] = field(default_factory=SessionOptions)
    first_position: int = 0

    @property
    def prefill(self) -> str:
        return SessionOptions.of(self.options).prefill or "eager"

    def beside(self) -> list[Cache]:
        """Caches of the same model whose numbers differ by a last bit of f16: how far apart they are is what
        products make of it. Of a model with RoPE a cache of f16 rows is twice there, as every token of the
        second one is a position later (on a GPU f32 rows are multiplied as f16 ones); of others f16 and f32
        rows. One where this cache is the other."""
        options = SessionOptions.of(self.options)
        own = options.kv or ("f16" if self.model.is_plain and not (options.kv_k or options.kv_v) else "")
        words = [] if own == "f16" else ["f16"]
        caches = [Cache(self.model, options.reference(word)) for word in words]
        last = options.reference("f16" if self.model.has_rope else "f32")
        return [*caches, Cache(self.model, last, first_position=int(self.model.has_rope))]

    def run(self, windows: int, n_ctx: int, n_ubatch: int, n_batch: int) -> Run:
        options = planned(self.model, self.options)
        n_all = windows * n_ctx
        sized = replace(options, n_ctx=n_all, n_seq_max=windows, n_ubatch=n_ubatch, n_batch=n_batch)
        return Run(_core.Session(self.model, **replace(sized, prefill=self.prefill)), self.first_position)


@dataclass(frozen=True)
class Run:
    session: _core.Session
    first_position: int


@dataclass(frozen=True)
class Progress:
    """After each slice: what is done, and the perplexity so far."""

    windows: float
    of: int
    ppl: float


def perplexity(
    cache: Cache,
    text: str,
    *,
    n_ctx: int = 1024,
    window: str = "llama",
    chunks: int | None = None,
    decode: bool = False,
    parallel: int = 0,
    n_ubatch: int = 0,
    against: Cache | None = None,
    floor: bool = False,
    depth_buckets: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:
    """Scores `text` in windows of `n_ctx` tokens.

    Args:
        window: "llama" scores the second half of each window, as llama-perplexity does; "plain" every token
            but the first.
        chunks: at most this many windows.
        decode: runs tokens one by one, so that every score comes through the cache as in generation. With a
            lazy prefill the tokens before the first scored one are a prompt.
        parallel: windows that run together as sequences (0: 8 with `decode`, else as many as fill a call).
        n_ubatch: tokens of a call and of a ubatch; 0 = SLICE, of a ubatch at most as many.
        against: a second cache that runs over the same tokens, for the reference's statistics of summary().
            Logits are compared slice by slice and never stored.
        floor: also measures what rounding alone makes of a last bit (Cache.beside()), on the first windows,
            at least FLOOR_WINDOWS where there are so many.

    Returns JSON values: ppl, nll, tokens, kld, same_top, floor and the settings; kv_bytes, allocated for all
    `parallel` windows; kv_bytes_per_token, what one more token of context takes beside exact ones.
    """
    if window not in WINDOWS:
        raise expected("--window", " or ".join(WINDOWS), repr(window))
    lazy = cache.prefill == "lazy"
    if lazy and not decode:
        raise expected(
            "--prefill", "eager, or --decode", "lazy", "tokens of a lazy prompt see no compression"
        )
    windows = _windows(cache.model, text, n_ctx, window, chunks)
    if against is not None:
        _require_same_vocabulary(cache.model, against.model, text)
    count = len(windows.tokens)
    parallel = parallel and ranges.N_SEQ_MAX.check("--parallel", parallel)
    n_batch = n_ubatch or SLICE
    parallel = min(count, parallel or (8 if decode else max(1, n_batch // n_ctx)))
    slice_tokens = min(n_batch, max(1, _LOGITS_BYTES // (4 * cache.model.n_vocab)))
    caches = [cache] if against is None else [cache, against, *(against.beside() if floor else ())]
    runs = [each.run(parallel, n_ctx, n_ubatch, n_batch) for each in caches]
    begin = time.perf_counter()
    slices = _run(runs, windows, parallel, slice_tokens, decode, lazy)
    scores, depths, floor_scores = _gathered(slices, count, progress)
    seconds = time.perf_counter() - begin
    result = summary(scores) | {
        "chunks": count,
        "n_ctx": n_ctx,
        "window": window,
        "parallel": parallel,
        "decode": decode,
        "prefill": cache.prefill,
        "weights": cache.model.weights,
        **_sizes(runs[0].session),
        "implementations": dict(runs[0].session.implementations),
        "seconds": seconds,
        "tokens_per_second": count * (n_ctx - 1) / seconds,
    }
    if against is not None:
        result["kv_bytes_per_token_ref"] = runs[1].session.kv_bytes()["per_token"]
        result["floor"] = floor_scores and _floor(floor_scores, windows.scored)
    if depth_buckets:
        result["depth"] = by_depth(scores, depths)
    return result


@dataclass(frozen=True)
class _Slice:
    """done: windows, with this slice. depths: of its scores. floor: of what moves a last bit."""

    done: float
    scores: Scores
    depths: NDArray[np.int32]
    floor: Scores | None


def _gathered(
    slices: Iterable[_Slice], n_windows: int, progress: Callable[[Progress], None] | None
) -> tuple[Scores, NDArray[np.int32], Scores | None]:
    """All scores and depths of the slices that _run() yields, in order, and the floor's scores."""
    parts: list[Scores] = []
    depths: list[NDArray[np.int32]] = []
    floors: list[Scores] = []
    nll_sum = tokens = 0.0
    for each in slices:
        parts.append(each.scores)
        depths.append(each.depths)
        if each.floor is not None:
            floors.append(each.floor)
        nll_sum, tokens = nll_sum + float(each.scores.nll.sum()), tokens + each.scores.nll.size
        if progress is not None:
            progress(Progress(each.done, n_windows, float(np.exp(nll_sum / tokens))))
    return concatenate(parts), np.concatenate(depths), concatenate(floors) if floors else None


def _floor(scores: Scores, scored: int) -> dict[str, Any]:
    """scored: tokens of a window."""
    found = summary(scores)
    wanted = ("kld", "same_top", "same_top_se", "tokens")
    return {"chunks": found["tokens"] // scored, **{name: found[name] for name in wanted}}


def _sizes(session: _core.Session) -> dict[str, Any]:
    size = session.kv_bytes()
    return {
        "kv_bytes": size["total"],
        "kv_bytes_per_token": size["per_token"],
        "f16_bytes_per_token": size["f16_per_token"],
        "share_of_f16": size["share"],
    }


def _windows(model: _core.Model, text: str, n_ctx: int, window: str, chunks: int | None) -> Windows:
    bos = model.token_bos() if model.add_bos() else None
    windows = WINDOWS[window](model.tokenize(utf8(text, "text"), True, False), n_ctx, bos)
    if chunks is None:
        return windows
    if chunks < 1:
        raise expected("--chunks", "at least 1", chunks)
    return Windows(windows.tokens[:chunks], windows.first)


def _require_same_vocabulary(model: _core.Model, reference: _core.Model, text: str) -> None:
    if reference.n_vocab != model.n_vocab:
        wanted = f"a reference with {model.n_vocab} vocabulary entries"
        raise expected("--kld-against", wanted, reference.n_vocab)
    sample = utf8(text[:4096], "text")
    if reference.tokenize(sample, True, False) != model.tokenize(sample, True, False):
        raise expected(
            "--kld-against", "a reference with the same tokenizer", "other tokens for the same text"
        )


def _run(
    runs: list[Run],
    windows: Windows,
    parallel: int,
    slice_tokens: int,
    decode: bool,
    lazy: bool,
) -> Iterator[_Slice]:
    """A slice is the same span of positions of `parallel` windows. runs: of the cache, and of the reference
    and what is beside it; the latter are dropped after FLOOR_WINDOWS."""
    last = windows.n_ctx - 1  # the last token of a window is predicted, never read
    for start in range(0, len(windows.tokens), parallel):
        if start >= FLOOR_WINDOWS:
            del runs[2:]
        group = windows.tokens[start : start + parallel]
        span = 1 if decode else max(1, slice_tokens // len(group))
        for run in runs:
            run.session.clear()
        prompt = windows.first if lazy else 0
        for p0 in ([0] if prompt else []) + list(range(prompt, last, span)):
            p1 = prompt if p0 < prompt else min(p0 + span, last)
            first = max(p0, windows.first)
            outputs = _decode_all(runs, group, p0, p1, windows.first)
            if first >= p1:
                continue
            targets = group[:, first + 1 : p1 + 1].ravel()
            depth = np.tile(np.arange(first + 1, p1 + 1, dtype=np.int32), len(group))
            done = start + len(group) * p1 / last
            floor = score(outputs[-1], targets, outputs[-2]) if len(outputs) > 2 else None
            yield _Slice(done, score(outputs[0], targets, *outputs[1:2]), depth, floor)


def _decode_all(
    runs: list[Run], group: NDArray[np.int32], p0: int, p1: int, first: int
) -> list[NDArray[np.float32]]:
    """Logits [sequences × scored positions, n_vocab] of each run, sequence-major."""
    count, width = len(group), p1 - p0
    tokens = group[:, p0:p1].ravel().tolist()
    pos = np.tile(np.arange(p0, p1), count)
    seq = np.repeat(np.arange(count), width).tolist()
    output = (pos >= first).tolist()
    return [
        run.session.decode(tokens, pos=(pos + run.first_position).tolist(), seq=seq, output=output)
        for run in runs
    ]
