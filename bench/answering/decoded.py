"""Divergence as in use: of each window the first half is a prompt, the second is decoded token by token."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from answering.answers import Cache

STEPS = 16  # of all windows that are scored together
BLOCK = 256  # tokens of a window whose divergences count as one for the standard error
SCORING = min(8, os.cpu_count() or 1)  # threads: one takes longer for a slice than a GPU to decode it
PENDING = 2 * SCORING  # slices that wait while the next ones are decoded

Logits = NDArray[np.float32]


def windows_of(model: Any, text: str, n_ctx: int, chunks: int, scored: int = 0) -> Any:
    """At most `chunks` windows of `n_ctx` tokens, latentkv.measure.windows.Windows; of each the last `scored`
    are decoded (0: the second half)."""
    from latentkv.measure.windows import Windows, llama

    bos = model.token_bos() if model.add_bos() else None
    windows = llama(model.tokenize(text.encode(), True, False), n_ctx, bos)
    first = n_ctx - 1 - scored if scored else windows.first
    return Windows(windows.tokens[:chunks], first)


def slices(cache: Cache, tokens: NDArray[np.int32], first: int) -> Iterator[Logits]:
    """Logits [steps, windows, n_vocab] of all tokens [windows, n_ctx] from `first` to the last but one, which
    go together."""
    n_windows, n_ctx = tokens.shape
    session = cache.session(n_windows, n_windows * n_ctx)
    for seq, window in enumerate(tokens):
        session.decode(window[:first].tolist(), seq=[seq] * first, output="none")
    every = list(range(n_windows))
    for begin in range(first, n_ctx - 1, STEPS):
        steps = range(begin, min(begin + STEPS, n_ctx - 1))
        yield np.stack([session.decode(tokens[:, at].tolist(), seq=every, output="all") for at in steps])


def record(cache: Cache, windows: Any, path: Path) -> None:
    """Writes the logits of a reference, f32 [steps, windows, n_vocab], whole or not at all."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        for logits in slices(cache, windows.tokens, windows.first):
            logits.tofile(file)
    partial.replace(path)


def compared(cache: Cache, windows: Any, reference: Path, together: int) -> dict[str, Any]:
    """latentkv.measure.divergence.summary() of a cache against recorded logits of the same windows,
    `together` of which are decoded at a time."""
    n_windows = len(windows.tokens)

    def parts() -> Iterator[tuple[int, Logits]]:
        for low in range(0, n_windows, together):
            for logits in slices(cache, windows.tokens[low : low + together], windows.first):
                yield low, logits

    return against(parts(), windows, reference, cache.model.n_vocab)


def against(
    parts: Iterator[tuple[int, Logits]], windows: Any, reference: Path, n_vocab: int
) -> dict[str, Any]:
    """summary() of logits [steps, windows, n_vocab], each with the first of the windows that they are of; the
    steps of the same windows follow each other. The error of the mean divergence is that over blocks of
    tokens, because neighbours diverge together."""
    from latentkv.measure.divergence import concatenate, score, summary

    shape = (windows.scored, len(windows.tokens), n_vocab)
    wanted = np.memmap(reference, dtype=np.float32, mode="r", shape=shape)
    scored: list[Any] = []
    waiting: deque[Future[Any]] = deque()
    done: dict[int, int] = {}  # steps, by the first window
    windows_of_part: list[NDArray[np.int32]] = []
    with ThreadPoolExecutor(SCORING) as pool:
        for low, logits in parts:
            n_steps, n_windows, _ = logits.shape
            steps = slice(done.get(low, 0), done.get(low, 0) + n_steps)
            done[low] = steps.stop
            these = slice(low, low + n_windows)
            windows_of_part.append(np.tile(np.arange(low, low + n_windows, dtype=np.int32), n_steps))
            targets = windows.tokens[these, windows.first + 1 :][:, steps].T.ravel()
            other = wanted[steps, these].reshape(-1, n_vocab)
            waiting.append(pool.submit(score, logits.reshape(other.shape), targets, other))
            if len(waiting) > PENDING:
                scored.append(waiting.popleft().result())
        scored += [each.result() for each in waiting]
    scores = concatenate(scored)
    result = summary(scores)
    result["kld"]["mean_se"] = blocked_error(scores.kld, np.concatenate(windows_of_part))
    return result


def blocked_error(values: NDArray[np.float64], window: NDArray[np.int32]) -> float:
    """Standard error of the mean of `values` [n], in order within each `window` [n], over blocks of BLOCK
    neighbours or a few more; a window of fewer is one block."""
    by_window = [values[window == each] for each in np.unique(window)]
    means = [part.mean() for own in by_window for part in np.array_split(own, max(1, len(own) // BLOCK))]
    return float(np.std(means, ddof=1) / np.sqrt(len(means))) if len(means) > 1 else 0.0
