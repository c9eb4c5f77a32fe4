"""Logits of a GPU against the CPU's, same file and tokens: a prompt, then single tokens.

One session a row format.

    python bench/gpu/logits.py MODEL.gguf … --text TEXT --kv f16,q8,q4 --json out.json

Both keep every token's rows in the same formats, made from hidden states that differ in rounding (ggml's own
matrix products), so quantized rows differ where a value lies at the border of two codes. What the format
costs on either is beside it: the divergence from the CPU's f16 rows. Those two have to be alike.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentkv import _core
from latentkv.measure.divergence import score


def logits(model: _core.Model, kv: str, tokens: list[int], prompt: int) -> NDArray[np.float32]:
    """[1 + len(tokens) - prompt, n_vocab] after the prompt and after every token behind it."""
    session = _core.Session(model, n_ctx=len(tokens), kv=kv)
    rows = [session.decode(tokens[:prompt], output="last")]
    rows += [session.decode([token]) for token in tokens[prompt:]]
    return np.concatenate([np.reshape(row, (1, -1)) for row in rows])


def divergence(got: NDArray[np.float32], want: NDArray[np.float32]) -> tuple[float, float]:
    """Mean KLD and the share of rows with the same most likely token."""
    scores = score(got, want.argmax(axis=1).astype(np.int32), want)
    assert scores.kld is not None
    assert scores.same_top is not None
    return float(scores.kld.mean()), float(scores.same_top.mean())


def compare(path: Path, kvs: list[str], text: bytes, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    cpu = _core.Model(str(path))
    gpu = _core.Model(str(path), n_gpu_layers=99)
    tokens = cpu.tokenize(text)[: args.prompt + args.decode]
    exact = logits(cpu, "f16", tokens, args.prompt)
    for kv in kvs:
        want = exact if kv == "f16" else logits(cpu, kv, tokens, args.prompt)
        got = logits(gpu, kv, tokens, args.prompt)
        error = np.linalg.norm(np.subtract(got, want, dtype=np.float64), axis=1) / np.linalg.norm(
            want, axis=1
        )
        mean_kld, same_top = divergence(got, want)
        yield {
            "file": path.stem,
            "kv": kv,
            "median_relative_error": float(np.median(error)),
            "largest_relative_error": float(error.max()),
            "mean_kld": mean_kld,
            "same_top": same_top,
            "cpu_mean_kld_to_f16": divergence(want, exact)[0],
            "gpu_mean_kld_to_f16": divergence(got, exact)[0],
            "rows_of_logits": len(error),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--kv", default="f16,q8,q4")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--decode", type=int, default=128)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not _core.build_info()["cuda"]:
        sys.exit("[gpu_logits] expected a build with CUDA; got one without")
    rows = []
    for path in args.models:
        for row in compare(path, args.kv.split(","), args.text.read_bytes(), args):
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "build": _core.build_info()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
