"""Divergence of the same caches in llama.cpp and here, of several models in one table.

    python bench/ladder/engines.py SmolLM2=llama-cpp-smollm2 Gemma=llama-cpp-gemma3 … --save llama-cpp-caches

Each NAME=RESULT is a column pair: a table of bench/ladder.py with rows of both engines, below bench/results.
Every engine is compared with its own f16 cache. A cache that an engine lacks has no number.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/

import record
from ladder import libllama
from record import RESULTS, Column

OURS = {"llama.cpp": "llama.cpp"} | dict.fromkeys(("full K and V", "K in blocks of tokens"), "latentkv")
ENGINES = ("llama.cpp", "latentkv")


def merged(results: list[tuple[str, dict[str, Any]]]) -> tuple[list[Column], list[dict[str, Any]]]:
    """Columns and rows, from (model, result); caches of llama.cpp first, in its order."""
    columns = [Column("cache", "cache"), Column("share", "of f16", ".0%")]
    known = [k if k == v else f"{k} keys, {v} values" for k, v in libllama.CACHES]
    rows: dict[str, dict[str, Any]] = {name: {"cache": name} for name in known}
    for at, (model, result) in enumerate(results):
        columns += [Column(f"{engine}_{at}", f"{model}, {engine}", ".2g") for engine in ENGINES]
        for row in result["rows"]:
            if (engine := OURS.get(row["family"])) and row["kld"] is not None:
                own = rows.setdefault(row["setting"], {"cache": row["setting"]})
                own.setdefault("share", row["share"])
                own |= {f"{engine}_{at}": row["kld"], f"{engine}_{at}_se": row["kld_se"]}
    empty = dict.fromkeys(column.key for column in columns)
    return columns, [empty | row for row in rows.values()]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="NAME=RESULT")
    parser.add_argument(
        "--save", metavar="NAME", required=True, help="writes bench/results/llama-cpp/NAME.json"
    )
    args = parser.parse_args()
    results = []
    for each in args.models:
        model, _, name = each.partition("=")
        found = list(RESULTS.rglob(f"{name}.json"))
        if len(found) != 1:
            why = f"[models] expected one {name}.json below bench/results; got {len(found)}"
            print(f"error: {why}", file=sys.stderr)
            return 2
        results.append((model, json.loads(found[0].read_text(encoding="utf-8"))))
    columns, rows = merged(results)
    record.save(
        RESULTS / "llama-cpp" / f"{args.save}.json",
        command=shlex.join(["python", "bench/ladder/engines.py", *sys.argv[1:]]),
        columns=columns,
        rows=rows,
        note=" ".join(f"{model}: {result['note']}" for model, result in results),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
