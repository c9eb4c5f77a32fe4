"""Quality against bytes: one curve per method from rows of a result.

python bench/curves.py NAME TITLE      draws bench/results/**/NAME.json beside it, its caches named
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from record import RESULTS

Point = tuple[float, float]


def frontier(points: list[Point]) -> list[Point]:
    """The points that no other beats in both bytes and divergence, by bytes.

    >>> frontier([(10, 0.5), (20, 0.6), (30, 0.1)])
    [(10, 0.5), (30, 0.1)]
    """
    best: list[Point] = []
    for point in sorted(points):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def draw(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Mean KLD over the share of the f16 cache's bytes; every row a dot, a method's best rows a line. A row
    may have a "label" that stands beside its dot."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    points: dict[str, list[Point]] = defaultdict(list)
    for row in rows:
        if row["kld"]:  # the reference itself is 0, which a logarithm does not show
            points[row["method"]].append((100 * row["share"], row["kld"]))
    figure, axis = plt.subplots(figsize=(7.5, 5), layout="constrained")
    for number, (method, found) in enumerate(points.items()):
        uncompressed = method == "none"
        style: dict[str, Any] = {"color": "black" if uncompressed else f"C{number % 10}"}
        axis.scatter(*zip(*found, strict=True), s=14, alpha=0.35, **style)
        label = "full K and V" if uncompressed else method
        line = "--" if uncompressed else "-"
        axis.plot(*zip(*frontier(found), strict=True), line, marker="o", markersize=4, label=label, **style)
    for row in rows:
        if row["kld"] and row.get("label"):
            place = (100 * row["share"], row["kld"])
            below = "window" in row["method"]
            axis.annotate(
                row["label"], place, (6, -9 if below else 4), textcoords="offset points", fontsize=8
            )
            axis.margins(x=0.09)
    axis.set_yscale("log")
    axis.set_xlabel("bytes per token, % of the f16 cache")
    axis.set_ylabel("mean KL divergence, nats per token")
    axis.set_title(title, fontsize=10)
    axis.grid(which="both", alpha=0.2)
    axis.legend(fontsize=8)
    partial = path.with_suffix(".partial.png")
    figure.savefig(partial, dpi=130)
    plt.close(figure)
    partial.replace(path)


def main(name: str, title: str) -> None:
    path = next(RESULTS.rglob(f"{name}.json"))
    found = json.loads(path.read_text(encoding="utf-8"))["rows"]
    rows = [
        {
            "method": "none" if row["family"] == "full K and V" else row["family"],
            "share": row["share"] / 100,
            "kld": row["kld"],
            "label": row["cache"].removeprefix("converted, "),
        }
        for row in found
    ]
    draw(rows, path.with_suffix(".png"), title)


if __name__ == "__main__":
    main(*sys.argv[1:])
