"""llama.cpp itself decodes windows with one of its caches: logits on standard output.

    python -m ladder.libllama JOB.json       in bench/

It runs libllama from the package llama-cpp-py-sync, in a process of its own: a failed assertion ends that.
Windows are decoded as answering/decoded.py does: the first half of each in batches of the same size, then all
windows together, token by token.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from answering.answers import SLACK, UBATCH

BYTES = {"f16": 2, "q8_0": 34 / 32, "q5_1": 24 / 32, "q4_0": 18 / 32}  # of a number
TYPES = {"f16": 1, "q8_0": 8, "q5_1": 7, "q4_0": 2}  # of ggml_type
CACHES = (("f16", "f16"), ("q8_0", "q8_0"), ("q5_1", "q5_1"), ("q4_0", "q4_0"), ("q8_0", "q4_0"))
PACKAGE = "llama_cpp_py_sync"


@dataclass(frozen=True)
class Decoding:
    """tokens: [windows, n_ctx]. first: the first position that is scored."""

    model: str
    tokens: list[list[int]]
    first: int
    kv_k: str
    kv_v: str
    threads: int = 0


@cache
def is_there() -> bool:
    """Whether the package is installed and its library can be loaded, which wants glibc 2.38."""
    if importlib.util.find_spec(PACKAGE) is None:
        return False
    program = f"from {PACKAGE}._cffi_bindings import get_lib; get_lib()"
    return subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0


def share(kv_k: str, kv_v: str) -> float:
    return (BYTES[kv_k] + BYTES[kv_v]) / (2 * BYTES["f16"])


def slices(decoding: Decoding, n_vocab: int) -> Iterator[NDArray[np.float32]]:
    """Logits [windows, n_vocab] of every step, from a process that ends with this.

    Raises:
        ValueError: the process failed; its last line.
    """
    n_windows, n_ctx = len(decoding.tokens), len(decoding.tokens[0])
    size = 4 * n_windows * n_vocab
    with tempfile.NamedTemporaryFile("w", suffix=".json") as job, tempfile.TemporaryFile() as errors:
        json.dump(asdict(decoding), job)
        job.flush()
        command = [sys.executable, "-m", "ladder.libllama", job.name]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
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


def opened(decoding: Decoding) -> tuple[Any, Any, Any, int]:
    """ffi, library, context, and the size of the vocabulary."""
    from llama_cpp_py_sync._cffi_bindings import get_ffi, get_lib

    ffi, lib = get_ffi(), get_lib()
    lib.llama_backend_init()
    options = lib.llama_model_default_params()
    options.n_gpu_layers, options.use_extra_bufts = 0, False  # weights as they are, not repacked
    model = lib.llama_model_load_from_file(decoding.model.encode(), options)
    if model == ffi.NULL:
        raise SystemExit(f"libllama does not load {Path(decoding.model).name}")
    n_windows, n_ctx = len(decoding.tokens), len(decoding.tokens[0])
    settings = lib.llama_context_default_params()
    settings.n_ctx, settings.n_seq_max = n_windows * (n_ctx + SLACK), n_windows
    settings.n_batch = settings.n_ubatch = UBATCH
    settings.n_threads = settings.n_threads_batch = decoding.threads or os.cpu_count()
    settings.type_k, settings.type_v = TYPES[decoding.kv_k], TYPES[decoding.kv_v]
    settings.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED  # which a quantized V needs
    context = lib.llama_init_from_model(model, settings)
    if context == ffi.NULL:
        raise SystemExit("libllama makes no context")
    return ffi, lib, context, lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))


def main(job: str) -> None:
    decoding = Decoding(**json.loads(Path(job).read_text(encoding="utf-8")))
    ffi, lib, context, n_vocab = opened(decoding)
    batch = lib.llama_batch_init(UBATCH, 0, 1)

    def decode(tokens: list[int], positions: list[int], sequences: list[int], wanted: bool) -> None:
        batch.n_tokens = len(tokens)
        for at, (token, position, sequence) in enumerate(zip(tokens, positions, sequences, strict=True)):
            batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position, 1
            batch.seq_id[at][0], batch.logits[at] = sequence, int(wanted)
        if lib.llama_decode(context, batch) != 0:
            raise SystemExit("libllama does not decode")

    for sequence, window in enumerate(decoding.tokens):
        for begin in range(0, decoding.first, UBATCH):
            part = window[begin : min(begin + UBATCH, decoding.first)]
            decode(part, list(range(begin, begin + len(part))), [sequence] * len(part), False)
    every = list(range(len(decoding.tokens)))
    for at in range(decoding.first, len(decoding.tokens[0]) - 1):
        decode([window[at] for window in decoding.tokens], [at] * len(every), every, True)
        for i in every:
            sys.stdout.buffer.write(ffi.buffer(lib.llama_get_logits_ith(context, i), 4 * n_vocab))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1])
