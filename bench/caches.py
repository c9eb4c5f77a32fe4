"""Caches of a plain GGUF, as `--kv` names them: bytes, and divergence from f16 in use.

    python bench/caches.py MODEL [--kv f16,q8_0,small,…] [--save NAME]

MODEL is a name of bench/inputs/real_models.py or a GGUF. All caches read the same windows of the held-out
text of bench/inputs/texts.py side by side: first halves as a prompt, second ones token by token. A cache may
bring numbers of sinks and recent tokens, as in c4/q4+4+128.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

import methods
from answering.answers import Cache
from answering.decoded import slices, windows_of
from inputs import real_models, texts
from record import RESULTS, Column, save

CONTEXT = 32768  # tokens at which bytes are counted
COLUMNS = [
    Column("kv", "cache"),
    Column("formats", "K/V"),
    Column("share", "of f16", ".1%"),
    Column("kld", "mean KLD", ".5f"),
    Column("kld_se", "±", ".5f"),
    Column("same_top", "same top", ".1%"),
]


def options_of(name: str) -> dict[str, Any]:
    """`c4/q4+4+128`: Session's keywords, with sinks and recent tokens."""
    kv, *exact = name.split("+")
    return {"kv": kv, **dict(zip(("sink", "recent"), map(int, exact), strict=False))}


def compared(model: Any, names: list[str], windows: Any, n_threads: int) -> list[dict[str, Any]]:
    """A row for every cache, the first of which is the reference of the others."""
    from latentkv.measure.divergence import concatenate, score, summary

    caches = [Cache(model, options_of(name) | {"n_threads": n_threads}) for name in names]
    targets = windows.tokens[:, windows.first + 1 :]
    parts: list[list[Any]] = [[] for _ in caches]
    at = 0
    for logits in zip(*(slices(cache, windows.tokens, windows.first) for cache in caches), strict=True):
        reference, steps = logits[0].reshape(-1, model.n_vocab), slice(at, at + len(logits[0]))
        at = steps.stop
        for found, each in zip(parts, logits, strict=True):
            found.append(score(each.reshape(reference.shape), targets[:, steps].T.ravel(), reference))
        print(f"{at} of {windows.scored} tokens", file=sys.stderr, flush=True)
    return [row(model, name, summary(concatenate(found))) for name, found in zip(names, parts, strict=True)]


def row(model: Any, name: str, found: dict[str, Any]) -> dict[str, Any]:
    from latentkv.plan.master import planned

    options = planned(model, options_of(name))
    size = model.forecast(CONTEXT, **options)
    full = model.forecast(CONTEXT, kv="f16")
    formats = options["kv"] or f"{options['kv_k']}/{options['kv_v']}"
    kld = found["kld"]
    return {
        "kv": name,
        "formats": formats,
        "share": size["total"] / full["total"],
        "kld": kld["mean"],
        "kld_se": kld["mean_se"],
        "same_top": found["same_top"],
    }


def main() -> int:
    from latentkv import _core
    from latentkv.plan import presets

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help=f"{', '.join(real_models.MODELS)} or a GGUF")
    named = ",".join(name for name, _, _ in presets.choices())
    parser.add_argument("--kv", default=f"{named},q4_0", help="caches; the first is the reference")
    parser.add_argument("-c", "--context", type=int, default=2048)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("-t", "--threads", type=int, default=0)
    parser.add_argument("--save", help="name of the result under bench/results")
    args = parser.parse_args()
    path = real_models.fetch(args.model) if args.model in real_models.MODELS else Path(args.model)
    model = _core.Model(str(path))
    windows = windows_of(model, "\n".join(texts.chapters()[1]), args.context, args.chunks)
    rows = compared(model, args.kv.split(","), windows, args.threads)
    for each in rows:
        print("{kv:>12} {formats:>8} {share:7.2%} {kld:.5f} ± {kld_se:.5f} {same_top:.1%}".format(**each))
    if args.save:
        words = ["python", "bench/caches.py", methods.shown(Path(args.model)), "--kv", args.kv]
        words += ["-c", str(args.context), "--chunks", str(args.chunks), "--save", args.save]
        note = (
            f"`{path.name}`, its own weights; the held-out text of `bench/inputs/texts.py` in "
            f"{len(windows.tokens)} windows of {args.context} tokens: first halves read as a prompt, second "
            "ones decoded token by token and scored. KLD in nats per token against f16. Bytes: all that is "
            f"allocated for {CONTEXT} tokens."
        )
        save(RESULTS / f"{args.save}.json", command=shlex.join(words), columns=COLUMNS, rows=rows, note=note)
    return 0


if __name__ == "__main__":
    sys.exit(main())
