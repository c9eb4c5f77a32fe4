"""Divergence as in use: of each window the first half is a prompt, the second is decoded token by token."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from answers import Cache

STEPS = 16  # of all windows that are scored together
PENDING = 8  # slices that wait to be scored while the next ones are decoded

Logits = NDArray[np.float32]


def windows_of(model: Any, text: str, n_ctx: int, chunks: int) -> Any:
    """At most `chunks` windows of `n_ctx` tokens, latentkv.windows.Windows."""
    from latentkv.windows import Windows, llama

    bos = model.token_bos() if model.add_bos() else None
    windows = llama(model.tokenize(text.encode(), True, False), n_ctx, bos)
    return Windows(windows.tokens[:chunks], windows.first)


def slices(cache: Cache, windows: Any) -> Iterator[tuple[Logits, NDArray[np.int32]]]:
    """Logits [rows, n_vocab] of STEPS steps of all windows, step by step, and the tokens that came [rows]."""
    n_windows, n_ctx = windows.tokens.shape
    session = cache.session(n_windows, n_windows * n_ctx)
    for seq, tokens in enumerate(windows.tokens):
        session.decode(tokens[: windows.first].tolist(), seq=[seq] * windows.first, output="none")
    every = list(range(n_windows))
    for begin in range(windows.first, n_ctx - 1, STEPS):
        end = min(begin + STEPS, n_ctx - 1)
        steps = [
            session.decode(windows.tokens[:, at].tolist(), seq=every, output="all")
            for at in range(begin, end)
        ]
        yield np.concatenate(steps), windows.tokens[:, begin + 1 : end + 1].T.ravel()


def record(cache: Cache, windows: Any, path: Path) -> None:
    """Writes the logits of a reference, f32 [rows, n_vocab], whole or not at all."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        for logits, _ in slices(cache, windows):
            logits.tofile(file)
    partial.replace(path)


def compared(cache: Cache, windows: Any, reference: Path) -> dict[str, Any]:
    """latentkv.divergence.summary() of a cache against recorded logits of the same windows."""
    from latentkv.divergence import concatenate, score, summary

    wanted = np.memmap(reference, dtype=np.float32, mode="r").reshape(-1, cache.model.n_vocab)
    if len(wanted) != len(windows.tokens) * windows.scored:
        raise ValueError(
            f"[decoded] expected {len(windows.tokens) * windows.scored} rows in {reference.name}; "
            f"got {len(wanted)}; pass --restart"
        )
    parts, at = [], 0
    waiting: deque[Future[Any]] = deque()
    with ThreadPoolExecutor(1) as pool:
        for logits, targets in slices(cache, windows):
            waiting.append(pool.submit(score, logits, targets, wanted[at : at + len(logits)]))
            at += len(logits)
            if len(waiting) > PENDING:
                parts.append(waiting.popleft().result())
        parts += [each.result() for each in waiting]
    return summary(concatenate(parts))
