"""Divergence by how full a cache is, drawn from what quality.py wrote.

    python bench/fill/picture.py fill-qwen --title "Qwen2.5-Coder-1.5B, 32768 tokens"

A cache named `fixedNAME` is a dashed line in the colour of NAME.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/

from command import arguments
from record import RESULTS

LEAST = 1e-6  # what an exact cache diverges by rounding; a logarithm has no 0
FIXED = "fixed"


def draw(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Mean KLD over the number of tokens in a cache."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        lines[row["cache"]].append((row["tokens"], max(row["kld"], LEAST)))
    names = [name for name in lines if not name.startswith(FIXED)]
    figure, axis = plt.subplots(figsize=(7.5, 4), layout="constrained")
    for name, found in lines.items():
        style = "--" if name.startswith(FIXED) else "-"
        colour = f"C{names.index(name.removeprefix(FIXED))}"
        axis.plot(*zip(*found, strict=True), style, marker="o", markersize=4, color=colour, label=name)
    axis.set_yscale("log")
    axis.set_xlabel("tokens in the cache")
    axis.set_ylabel("mean KL divergence, nats per token")
    axis.set_title(title, fontsize=10)
    axis.grid(which="both", alpha=0.2)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> int:
    of = arguments(__doc__)
    of.add_argument("name", metavar="NAME", help="of bench/results/fill/NAME.json")
    of.add_argument("--title", default="", help="above the picture (default: NAME)")
    args = of.parse_args()
    path = RESULTS / "fill" / f"{args.name}.json"
    draw(
        json.loads(path.read_text(encoding="utf-8"))["rows"],
        path.with_suffix(".png"),
        args.title or args.name,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
