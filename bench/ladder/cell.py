"""One cell of bench/ladder.py in a process of its own: a cache's bytes, then what it costs.

    python -m ladder.cell JOB.json       prints the row as JSON; in bench/

Bytes come first: what the runtime allocates has to be what it forecasts. A cache over its budget is not
measured: its row says how large it is, and why there is no more. The first job of a ladder is the f16 cache
itself: its logits and answers are kept for the others.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import drift
import needles
from answering import answers, decoded
from inputs import hide
from ladder import libllama

SERVED = 32768  # tokens at which whole caches are compared
ROOM = 1.005  # a published method's ranks are multiples of 16: it may miss its rung by this much
DEPTHS = (0.1, 0.5, 0.9)
NUMBERS = ("kld", "kld_se", "kld_median", "kld_p999", "same_top", "ppl", "scored")


@dataclass(frozen=True)
class Job:
    file: str
    plain: str  # the reference's file
    folder: str  # where the reference's logits and answers are
    text: str
    options: dict[str, Any] = field(default_factory=dict)  # Session's keywords, and kv_budget
    budget: float | None = None  # share of f16
    n_ctx: int = 4096
    chunks: int = 4
    scored: int = 0  # tokens of a window that are decoded, 0: half
    samples: int = 8  # passages with a hidden number, 0: none
    chars: int = 6000
    answers: int = 64  # 0: none
    tokens: int = 700
    parallel: int = 64  # answers at a time
    again: bool = True  # the reference is compared with itself
    threads: int = 0
    gpu_layers: int = 0
    weights: str = "stored"  # their type in memory
    program: str = ""  # llama.cpp's, of its own caches

    @property
    def is_reference(self) -> bool:
        return self.file == self.plain and self.options == {"kv": "f16"}

    def cache(self) -> dict[str, Any]:
        """Windows are fixed: what a full cache loses, whatever room there is."""
        return self.options | {"fixed_window": True}

    def threaded(self) -> dict[str, Any]:
        return self.cache() | {"n_threads": self.threads, "n_threads_batch": self.threads}


def run(job: Job) -> dict[str, Any]:
    from latentkv import _core

    where: dict[str, Any] = {"n_gpu_layers": job.gpu_layers, "weights": job.weights}
    model = _core.Model(job.file, **where)
    if "llama_cpp" in job.options:
        return llama_cpp(model, job)
    plain = model if job.file == job.plain else _core.Model(job.plain, **where)
    row = sizes(model, plain, job)
    if job.budget is not None and row["share"] > ROOM * job.budget:
        why = f"[bytes] expected at most {job.budget:.2%} of f16; got {row['share']:.2%}"
        return row | {"kld": None, "why": f"error: {why}"}
    text = Path(job.text).read_text(encoding="utf-8")
    cache = answers.Cache(model, job.threaded())
    return row | divergence(cache, plain, text, job) | found(cache, text, job) | drifted(cache, text, job)


def sizes(model: Any, plain: Any, job: Job) -> dict[str, Any]:
    """True bytes, checked; and that the device is the one that was asked for."""
    from latentkv import _core
    from latentkv.plan.master import planned

    options = planned(model, job.cache())
    session = _core.Session(model, n_ctx=job.n_ctx, n_threads=job.threads, **options)
    where = session.implementations["latent_attn"]
    if job.gpu_layers and "fused cuda" not in where:
        raise SystemExit(f"error: [--device] expected attention on a GPU; got {where}")
    allocated, forecast = (
        each["total"] for each in (session.kv_bytes(), model.forecast(job.n_ctx, **options))
    )
    if allocated != forecast:
        raise SystemExit(f"error: [bytes] expected {forecast} allocated, as forecast; got {allocated}")
    total = model.forecast(SERVED, **options)["total"]
    share = total / plain.forecast(SERVED, kv="f16", sink=0, recent=0)["f16_total"]
    factors = (model.size_bytes - plain.size_bytes) / (1 << 20)
    held = {"bytes": total / SERVED, "share": share, "factors": factors}
    return held | {"ran": where, "weights": model.weights}


def divergence(cache: answers.Cache, plain: Any, text: str, job: Job) -> dict[str, Any]:
    """Against the reference's logits, which the first job records. It meets itself in groups of half the
    size: what is left between the two is rounding, of which products with quantized weights have much."""
    windows = decoded.windows_of(plain, text, job.n_ctx, job.chunks, job.scored)
    reference = Path(job.folder) / "reference.logits"
    if job.is_reference and not reference.exists():
        decoded.record(cache, windows, reference)
    if job.is_reference and not job.again:
        return dict.fromkeys(NUMBERS)
    n_windows = len(windows.tokens)
    return numbers(
        decoded.compared(cache, windows, reference, (n_windows + 1) // 2 if job.is_reference else n_windows)
    )


def llama_cpp(plain: Any, job: Job) -> dict[str, Any]:
    """llama.cpp's own cache: its f16 rows against ours, which says how far the engines are apart, and its
    other rows against its own f16."""
    kv_k, kv_v = job.options["llama_cpp"]
    text = Path(job.text).read_text(encoding="utf-8")
    windows = decoded.windows_of(plain, text, job.n_ctx, job.chunks, job.scored)
    own = Path(job.folder) / "llama-cpp.logits"

    def steps(k: str, v: str) -> Iterator[Any]:
        where = (job.gpu_layers, job.threads)
        wanted = libllama.Decoding(job.program, job.plain, windows.tokens, windows.first, k, v, *where)
        return libllama.slices(wanted, plain.n_vocab)

    if not own.exists():
        partial = own.with_suffix(f".{os.getpid()}")  # two cells may begin together
        with partial.open("wb") as file:
            for logits in steps("f16", "f16"):
                logits.tofile(file)
        partial.replace(own)
    if kv_k == kv_v == "f16":
        shape = (windows.scored, len(windows.tokens), plain.n_vocab)
        parts: Iterator[Any] = iter(np.memmap(own, dtype=np.float32, mode="r", shape=shape))
        reference = Path(job.folder) / "reference.logits"
    else:
        parts, reference = steps(kv_k, kv_v), own
    whole = plain.forecast(SERVED, kv="f16", sink=0, recent=0)["f16_per_token"]
    share = libllama.share(kv_k, kv_v)
    result = decoded.against(((0, each[None]) for each in parts), windows, reference, plain.n_vocab)
    sizes = {"bytes": share * whole, "share": share, "factors": 0.0, "ran": "llama.cpp"}
    return sizes | numbers(result)


def numbers(result: dict[str, Any]) -> dict[str, Any]:
    kld = result["kld"]
    keys = ("mean", "mean_se", "median", "p999")
    values = [kld[key] for key in keys] + [result[key] for key in ("same_top", "ppl", "tokens")]
    return dict(zip(NUMBERS, values, strict=True))


def found(cache: answers.Cache, text: str, job: Job) -> dict[str, Any]:
    """Share of numbers found at each depth."""
    if not job.samples:
        return {}
    samples = hide.questions(text, job.samples, job.chars, depths=DEPTHS)
    hits = needles.asked(cache, samples, min(job.parallel, len(samples)))
    by_depth = needles.accuracy(samples, hits)["by_depth"]
    return {f"found_{float(depth):.0%}": share for depth, share in by_depth.items()}


def drifted(cache: answers.Cache, text: str, job: Job) -> dict[str, Any]:
    """Long answers beside the reference's; its own second ones come in groups of half the size."""
    if not job.answers:
        return {}
    asked = drift.questions(text, job.answers)
    kept = Path(job.folder) / "reference.answers.json"
    parallel = min(job.parallel, len(asked))
    if job.is_reference:
        if not kept.exists():
            first = drift.answered(cache, asked, job.tokens, parallel)
            write(kept, [asdict(answer) for answer in first])
        parallel = max(1, parallel // 2)
    reference = [drift.Answer(**each) for each in json.loads(kept.read_text(encoding="utf-8"))]
    return drift.compared(reference, drift.answered(cache, asked, job.tokens, parallel), job.tokens)


def write(path: Path, value: Any) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value), encoding="utf-8")
    partial.replace(path)


def main(argv: Sequence[str]) -> int:
    from latentkv.errors import LatentKVError

    job = Job(**json.loads(Path(argv[0]).read_text(encoding="utf-8")))
    try:
        print(json.dumps(run(job)))
    except (LatentKVError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
