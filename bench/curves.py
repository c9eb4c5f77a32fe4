"""Divergence over bytes: a curve per method that takes any budget, dots for row formats.

    python bench/curves.py divergence-f16-qwen-coder --title "Qwen2.5-Coder-1.5B" --gib 131072

draws a PNG beside bench/results/**/divergence-f16-qwen-coder.json.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from command import arguments
from record import RESULTS

Point = tuple[float, float]
FULL = "full K and V"
# Families of row formats, which have nothing between two of them; all others take any budget.
FORMATS = (FULL, f"{FULL}, window", "K in blocks of tokens", "llama.cpp", "OSCAR")


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


def draw(rows: list[dict[str, Any]], path: Path, title: str, whole: tuple[int, float] | None = None) -> None:
    """Mean KLD over the share of the f16 cache's bytes; every row a dot, and a method's best rows a line,
    unless it is of FORMATS. A row may have a "label" that stands beside its dot. whole: tokens, and the GiB
    that they take in f16, for a second axis."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    points: dict[str, list[Point]] = defaultdict(list)
    for row in rows:
        if row["kld"]:  # the reference itself is 0, which a logarithm does not show
            points[row["method"]].append((100 * row["share"], row["kld"]))
    figure, axis = plt.subplots(figsize=(7.5, 5), layout="constrained")
    for number, (method, found) in enumerate(points.items()):
        style: dict[str, Any] = {"color": "black" if method == FULL else f"C{number % 10}"}
        if method in FORMATS:
            marker = "osD^v"[FORMATS.index(method)]
            axis.scatter(*zip(*found, strict=True), s=24, marker=marker, label=method, **style)
            continue
        axis.scatter(*zip(*found, strict=True), s=14, alpha=0.35, **style)
        line = ":" if number >= 10 else "-"  # colours come again then
        axis.plot(*zip(*frontier(found), strict=True), line, marker="o", markersize=4, label=method, **style)
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
    if whole:
        tokens, gib = whole
        to, back = (lambda share: share * gib / 100), (lambda size: 100 * size / gib)
        axis.secondary_xaxis("top", functions=(to, back)).set_xlabel(f"GiB at {tokens} tokens")
    axis.grid(which="both", alpha=0.2)
    axis.legend(fontsize=8)
    partial = path.with_suffix(".partial.png")
    figure.savefig(partial, dpi=130)
    plt.close(figure)
    partial.replace(path)


def rows_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What draw() takes, of a result whose rows are caches.

    Raises:
        ValueError: a result of something else.
    """
    keys = {column["key"] for column in result["columns"]}
    if keys >= {"family", "setting", "share", "kld"}:  # of a ladder
        kept = [row for row in result["rows"] if row["kld"] is not None and row["setting"] != "f16"]
        return [row | {"method": row["family"]} for row in kept]
    if missing := {"cache", "share", "kld"} - keys:
        raise ValueError(f"expected a result with columns cache, share, kld; got none of {sorted(missing)}")
    made = []
    for row in result["rows"]:
        if row["cache"].startswith("f16"):
            continue  # what it loses against itself is rounding
        method = "converted" if "converted" in row["cache"] else FULL
        label = row["cache"].removeprefix("converted, ")
        made.append({"method": method, "share": row["share"] / 100, "kld": row["kld"], "label": label})
    return made


def gib_of(result: dict[str, Any], tokens: int) -> float:
    """GiB that so many tokens take in f16: a row of f16 has its bytes per token.

    Raises:
        ValueError: a result without one.
    """
    for row in result["rows"]:
        if "f16" in (row.get("cache"), row.get("setting")) and row.get("bytes"):
            return float(row["bytes"] * tokens / (1 << 30))
    raise ValueError("expected a row f16 with bytes, for --gib; got none")


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("name", metavar="NAME", help="of a file below bench/results, without .json")
    parser.add_argument("--title", default="", help="above the picture (default: NAME)")
    parser.add_argument(
        "--gib",
        type=int,
        metavar="TOKENS",
        help="a second axis: what so many tokens take (needs bytes of f16)",
    )
    parser.add_argument("--out", type=Path, help="the picture's file (default: beside the result)")
    args = parser.parse_args()
    found = list(RESULTS.rglob(f"{args.name}.json"))
    try:
        if len(found) != 1:
            raise ValueError(f"expected one {args.name}.json below bench/results; got {len(found)}")
        result = json.loads(found[0].read_text(encoding="utf-8"))
        rows = rows_of(result)
        whole = (args.gib, gib_of(result, args.gib)) if args.gib else None
    except ValueError as error:
        print(f"error: [NAME] {error}", file=sys.stderr)
        return 2
    draw(rows, args.out or found[0].with_suffix(".png"), args.title or args.name, whole)
    return 0


if __name__ == "__main__":
    sys.exit(main())
