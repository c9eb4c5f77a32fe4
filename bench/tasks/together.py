"""Several tasks of one model in one table.

    python bench/tasks/together.py divergence-qwen,humaneval-qwen,… --save qwen-coder

NAMES are results below bench/results. A cache that a task has not been solved with has no number there.
A task may have been solved with another file of the same budget, so each has a share of f16 of its own.
Problems lost and won are those of all tasks together.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/

import record
from command import arguments
from record import RESULTS, Column

COUNTS = ("lost", "won")
NAMES = {"humaneval": "HumanEval", "ruler": "RULER", "bfcl": "BFCL"}
NATS = ("kld", "kld_se", "kld_p999", "found")  # of divergence


def merged(results: list[tuple[str, dict[str, Any]]]) -> tuple[list[Column], list[dict[str, Any]]]:
    """Columns and rows, from (task, result)."""
    columns: list[Column] = []
    rows: dict[str, dict[str, Any]] = {}
    for task, result in results:
        nats = [each for each in result["columns"] if each["key"] in NATS]
        columns += [Column(**each) for each in nats]
        shares = [each for each in result["columns"] if each["unit"] == "%" and each["key"] != "share"]
        scores = [] if nats else shares
        named = NAMES.get(task, task)
        if scores:
            columns.append(Column(f"{task}_share", f"{named}: of f16", ".2f", "%"))
        for each in scores:
            columns.append(Column(f"{task}_{each['key']}", f"{named}, {each['label']}", ".1f", "%"))
        for row in result["rows"]:
            own = rows.setdefault(row["cache"], {"cache": row["cache"], "share": row["share"]})
            own |= {each["key"]: row[each["key"]] for each in nats}
            own |= {f"{task}_{each['key']}": row[each["key"]] for each in scores}
            if scores:
                own[f"{task}_share"] = row["share"]
            for key in COUNTS:
                if row.get(key) is not None:
                    own[key] = own.get(key, 0) + row[key]
    every = [Column("cache", "cache"), Column("share", "of f16", ".2f", "%"), *columns]
    every += [Column("lost", "lost against f16"), Column("won", "won")]
    empty = dict.fromkeys(column.key for column in every)
    return every, [empty | row for row in rows.values()]


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("names", help="comma separated; a task is what comes before the first dash")
    parser.add_argument("--save", metavar="NAME", required=True, help="writes bench/results/tasks/NAME.json")
    args = parser.parse_args()
    results = []
    for name in args.names.split(","):
        found = list(RESULTS.rglob(f"{name}.json"))
        if len(found) != 1:
            why = f"error: [names] expected one {name}.json below bench/results; got {len(found)}"
            print(why, file=sys.stderr)
            return 2
        results.append((name.partition("-")[0], json.loads(found[0].read_text(encoding="utf-8"))))
    columns, rows = merged(results)
    command = shlex.join(["python", "bench/tasks/together.py", *sys.argv[1:]])
    note = " ".join(result["note"] for _, result in results)
    environment = results[0][1]["environment"]
    record.save(
        RESULTS / "tasks" / f"{args.save}.json",
        command=command,
        columns=columns,
        rows=rows,
        note=note,
        environment=environment,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
