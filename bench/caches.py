"""Caches of a plain GGUF, as `--kv` names them: bytes, and divergence from f16.

    python bench/caches.py MODEL [--kv f16,q8_0,small,…] [-c 768] [--save NAME]

MODEL is a name of bench/inputs/real_models.py or a GGUF. All caches read one window of the held-out text of
bench/inputs/texts.py side by side, 32 tokens at a time, and the second half is scored. A cache may bring
numbers of sinks and recent tokens, as in c4/q4+4+128; the first one is the reference.
"""

from __future__ import annotations

import shlex
import sys
from typing import Any

import numpy as np

from command import arguments
from inputs import real_models, texts
from record import RESULTS, Column, save

CONTEXT = 32768  # tokens at which bytes are counted
BATCH = 32
BEGIN = slice(20000, 60000)  # characters of the text
COLUMNS = [
    Column("kv", "cache"),
    Column("formats", "K/V"),
    Column("share", "of f16", ".1%"),
    Column("kld", "mean KLD", ".4f"),
    Column("same_top", "same top", ".1%"),
]


def options_of(name: str) -> dict[str, Any]:
    """`c4/q4+4+128`: Session's keywords, with sinks and recent tokens."""
    kv, *exact = name.split("+")
    return {"kv": kv, **dict(zip(("sink", "recent"), map(int, exact), strict=False))}


def compared(model: Any, names: list[str], tokens: list[int], n_threads: int) -> list[dict[str, Any]]:
    """A row for every cache."""
    from latentkv import _core
    from latentkv.measure.divergence import concatenate, score, summary
    from latentkv.plan.master import planned

    n_ctx = len(tokens) - 1
    sizes = {"n_ctx": n_ctx + 2 * BATCH, "n_ubatch": BATCH, "n_threads": n_threads}
    sessions = [_core.Session(model, **sizes, **planned(model, options_of(name))) for name in names]
    parts: list[list[Any]] = [[] for _ in names]
    for at in range(0, n_ctx, BATCH):
        output = "all" if at >= n_ctx // 2 else "none"
        logits = [session.decode(tokens[at : at + BATCH], output=output) for session in sessions]
        targets = np.array(tokens[at + 1 : at + BATCH + 1], np.int32)
        for found, each in zip(parts, logits, strict=True):
            if output == "all":
                found.append(score(each, targets, logits[0]))
        print(f"{at + BATCH} of {n_ctx} tokens", file=sys.stderr, flush=True)
    return [row(model, name, summary(concatenate(found))) for name, found in zip(names, parts, strict=True)]


def row(model: Any, name: str, found: dict[str, Any]) -> dict[str, Any]:
    from latentkv.plan.master import planned

    options = planned(model, options_of(name))
    share = model.forecast(CONTEXT, **options)["total"] / model.forecast(CONTEXT, kv="f16")["total"]
    formats = options["kv"] or f"{options['kv_k']}/{options['kv_v']}"
    kld = found["kld"]["mean"]
    return {"kv": name, "formats": formats, "share": share, "kld": kld, "same_top": found["same_top"]}


def main() -> int:
    from latentkv import _core
    from latentkv.plan import presets

    parser = arguments(__doc__)
    parser.add_argument("model", help=f"{', '.join(real_models.MODELS)} or a GGUF")
    named = ",".join(name for name, _, _ in presets.choices())
    parser.add_argument("--kv", default=f"{named},q4_0", help="caches; the first is the reference")
    parser.add_argument("-c", "--context", type=int, default=768)
    parser.add_argument("-t", "--threads", type=int, default=0)
    parser.add_argument("-ngl", "--gpu-layers", type=int, default=0)
    parser.add_argument(
        "--weights", choices=("stored", "f16", "f32"), default="stored", help="their type in memory"
    )
    parser.add_argument("--save", help="name of the result under bench/results")
    args = parser.parse_args()
    path = real_models.model_path(args.model)
    model = _core.Model(str(path), n_gpu_layers=args.gpu_layers, weights=args.weights)
    text = "\n".join(texts.chapters()[1])[BEGIN].encode()
    tokens = model.tokenize(text, True, False)[: args.context + 1]
    rows = compared(model, args.kv.split(","), tokens, args.threads)
    for each in rows:
        print("{kv:>12} {formats:>8} {share:7.2%} {kld:.5f} {same_top:.1%}".format(**each))
    if args.save:
        words = ["python", "bench/caches.py", real_models.shown(args.model), "--kv", args.kv]
        words += ["-c", str(args.context), "--save", args.save]
        words += ["--weights", args.weights] if args.weights != "stored" else []
        weights = "its own weights" if args.weights == "stored" else f"weights in {args.weights}"
        note = (
            f"`{path.name}`, {weights}; {args.context} tokens of the held-out text of "
            f"`bench/inputs/texts.py`, {BATCH} at a time, second half scored. KLD in nats per token against "
            f"f16. Bytes: all that is allocated for {CONTEXT} tokens."
        )
        save(RESULTS / f"{args.save}.json", command=shlex.join(words), columns=COLUMNS, rows=rows, note=note)
    return 0


if __name__ == "__main__":
    sys.exit(main())
