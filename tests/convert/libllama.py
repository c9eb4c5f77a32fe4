"""llama.cpp itself as an oracle: `python libllama.py MODEL.gguf id,id,… [--chunk N]` writes the f32 logits of
every position, [n, n_vocab], to stdout.

It runs the library of the package llama-cpp-py-sync in a process of its own, as a failed assertion ends that.
LATENTKV_LIBLLAMA names another program to run in its place, with the same arguments.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

_F32 = 0  # of ggml_type


def program() -> list[str]:
    named = os.environ.get("LATENTKV_LIBLLAMA")
    return [named] if named else [sys.executable, str(Path(__file__).resolve())]


@functools.cache
def why_not() -> str:
    """Why there is no oracle, or ""."""
    if os.environ.get("LATENTKV_LIBLLAMA"):
        return ""
    found = subprocess.run([*program(), "--check"], capture_output=True, text=True)
    return "" if found.returncode == 0 else f"no libllama: {found.stderr.strip().splitlines()[-1][:300]}"


def logits(model: Path, ids: Sequence[int], chunk: int | None = None) -> np.ndarray:
    """[n, n_vocab]. chunk: tokens that are decoded at once, None: all."""
    options = [] if chunk is None else ["--chunk", str(chunk)]
    command = [*program(), str(model), ",".join(map(str, ids)), *options]
    found = subprocess.run(command, capture_output=True)
    assert found.returncode == 0, found.stderr.decode("utf-8", "replace")[-2000:]
    return np.frombuffer(found.stdout, dtype=np.float32).reshape(len(ids), -1)


def main(arguments: list[str]) -> int:
    try:
        from llama_cpp_py_sync._cffi_bindings import get_ffi, get_lib

        ffi, lib = get_ffi(), get_lib()
    except (ImportError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
        return 3
    if arguments == ["--check"]:
        return 0
    path, text, *rest = arguments
    ids = [int(token) for token in text.split(",")]
    chunk = int(rest[1]) if rest else len(ids)
    lib.llama_backend_init()
    options = lib.llama_model_default_params()
    options.n_gpu_layers, options.use_extra_bufts = 0, False  # weights as they are, not repacked
    model = lib.llama_model_load_from_file(path.encode(), options)
    assert model != ffi.NULL, f"libllama does not load {path}"
    settings = lib.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch = len(ids) + 256, len(ids) + 8, len(ids) + 8
    settings.n_threads = settings.n_threads_batch = 1
    settings.type_k, settings.type_v = _F32, _F32
    settings.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = lib.llama_init_from_model(model, settings)
    assert context != ffi.NULL, "libllama makes no context"
    n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    for begin in range(0, len(ids), chunk):
        part = ids[begin : begin + chunk]
        batch = lib.llama_batch_init(len(part), 0, 1)
        batch.n_tokens = len(part)
        for at, token in enumerate(part):
            batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, begin + at, 1
            batch.seq_id[at][0], batch.logits[at] = 0, 1
        assert lib.llama_decode(context, batch) == 0, "libllama does not decode"
        for at in range(len(part)):
            row = lib.llama_get_logits_ith(context, at)
            sys.stdout.buffer.write(ffi.buffer(row, 4 * n_vocab))
        lib.llama_batch_free(batch)
    sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
