"""Divergence from an f16 cache by how full a cache is.

    python bench/fill/quality.py -c 65536 --reference plain.gguf 14=model-14.gguf fixed=model-14.gguf:fixed

All caches read one text. The last tokens before each fill are scored by every cache: mean, median and 99.9 %
of the divergence of their distributions from those of the reference's f16 cache, and how often the likeliest
token is the same. The last fill is the whole context.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/

from fill.caches import Cache, Table, exact, opened, program, session
from inputs import texts
from latentkv.sampling.logprobs import log_softmax
from record import Column

COLUMNS = [
    Column("cache", "cache"),
    Column("context", "context"),
    Column("tokens", "tokens"),
    Column("exact", "of them exact"),
    Column("kld", "KLD mean", ".6f"),
    Column("median", "median", ".6f"),
    Column("worst", "99.9 %", ".4f"),
    Column("same_top", "same top", ".1%"),
]


def text_of(model: Any, path: Path | None, n: int, work: Path) -> list[int]:
    if path is None:
        path = texts.write(work)[0]
    tokens: list[int] = model.tokenize(path.read_bytes()[: 12 * n])
    while len(tokens) < n:
        tokens += tokens[1:]
    return tokens[:n]


def scored(session: Any, tokens: list[int], piece: int) -> np.ndarray:
    """Log-probabilities, [tokens, n_vocab]."""
    found = [
        log_softmax(session.decode(tokens[at : at + piece], output="all"))
        for at in range(0, len(tokens), piece)
    ]
    return np.concatenate(found)


def main() -> int:
    of = program(__doc__, 65536, 0)
    of.add_argument("--reference", required=True, help="the plain model")
    of.add_argument("--fills", default="0.0625,0.25,0.5,0.75,1", help="of the context, with commas between")
    of.add_argument("--scored", type=int, default=512, help="tokens (default 512)")
    of.add_argument("--piece", type=int, default=64, help="tokens that are scored at once")
    of.add_argument("--weights", default="f32", help="products of stored ones round (default: f32)")
    of.add_argument("--text", type=Path)
    of.add_argument("--work", type=Path, default=Path("build/fill"))
    args = of.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    caches = [Cache.parse(text) for text in args.caches]
    reference = Cache("reference", args.reference, "f16")
    models = opened([reference, *caches], args.ngl, args.weights)
    tokens = text_of(models[reference.file], args.text, args.context, args.work)
    sessions = {each: session(models[each.file], each, args.context) for each in (reference, *caches)}
    table, done = Table(COLUMNS), 0
    for fill in map(float, args.fills.split(",")):
        begin = int(fill * args.context) - args.scored
        for each in sessions.values():
            for at in range(done, begin, 4096):
                each.decode(tokens[at : min(begin, at + 4096)], output="none")
        done = begin + args.scored
        piece = tokens[begin:done]
        want = scored(sessions[reference], piece, args.piece)
        for each in caches:
            got = scored(sessions[each], piece, args.piece)
            kld = (np.exp(want, dtype=np.float64) * (want - got)).sum(axis=-1)
            row = {
                "cache": each.name,
                "context": args.context,
                "tokens": done,
                "exact": exact(sessions[each]),
                "kld": float(kld.mean()),
                "median": float(np.median(kld)),
                "worst": float(np.quantile(kld, 0.999)),
                "same_top": float((want.argmax(-1) == got.argmax(-1)).mean()),
            }
            table.add(row)
    note = f"{Path(args.reference).stem}, {args.scored} tokens at each fill, weights {args.weights}."
    table.keep(args, "quality", note)
    return 0


if __name__ == "__main__":
    sys.exit(main())
