"""llama.cpp itself decodes windows with one of its caches, in a process of its own.

The program is bench/ladder/llama_cpp, which says how it is built. Windows are decoded as answering/decoded.py
does: the first half of each in batches of the same size, then all windows together, token by token.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from record import ROOT

PROGRAM = ROOT / "build" / "llama-cpp" / "llama-windows"
BYTES = {"f16": 2, "q8_0": 34 / 32, "q5_1": 24 / 32, "q4_0": 18 / 32}  # of a number
CACHES = (("f16", "f16"), ("q8_0", "q8_0"), ("q5_1", "q5_1"), ("q4_0", "q4_0"), ("q8_0", "q4_0"))


@dataclass(frozen=True)
class Decoding:
    """tokens: [windows, n_ctx]. first: the first position that is scored."""

    program: str
    model: str
    tokens: NDArray[np.int32]
    first: int
    kv_k: str
    kv_v: str
    gpu_layers: int = 0
    threads: int = 0  # 0: llama.cpp's choice


def share(kv_k: str, kv_v: str) -> float:
    return (BYTES[kv_k] + BYTES[kv_v]) / (2 * BYTES["f16"])


def slices(decoding: Decoding, n_vocab: int) -> Iterator[NDArray[np.float32]]:
    """Logits [windows, n_vocab] of every step, from a process that ends with this.

    Raises:
        ValueError: the process failed; its last line.
    """
    n_windows, n_ctx = decoding.tokens.shape
    size = 4 * n_windows * n_vocab
    options = [decoding.kv_k, decoding.kv_v, str(decoding.gpu_layers), str(decoding.threads)]
    with tempfile.TemporaryFile() as windows, tempfile.TemporaryFile() as errors:
        np.array([n_windows, n_ctx, decoding.first], np.int32).tofile(windows)
        decoding.tokens.astype(np.int32).tofile(windows)
        windows.seek(0)
        process = subprocess.Popen(
            [decoding.program, decoding.model, *options], stdin=windows, stdout=subprocess.PIPE, stderr=errors
        )
        assert process.stdout is not None
        try:
            for _ in range(decoding.first, n_ctx - 1):
                data = process.stdout.read(size)
                if len(data) != size:
                    process.wait()
                    errors.seek(0)
                    said = errors.read().decode("utf-8", "replace").strip().splitlines()
                    raise ValueError(f"error: [llama.cpp] {said[-1] if said else 'it ended'}")
                yield np.frombuffer(data, np.float32).reshape(n_windows, n_vocab)
        finally:
            process.kill()
            process.wait()
