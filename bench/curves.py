"""Quality against bytes: one curve per method from rows of a result."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

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
    """Mean KLD over the share of the f16 cache's bytes; every row a dot, a method's best rows a line."""
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
