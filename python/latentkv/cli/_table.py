"""Tables and numbers for people."""

from __future__ import annotations

from collections.abc import Sequence


def bytes_text(count: float) -> str:
    """Three digits and a binary unit: 8192 → "8.00 KiB"."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if count < 1024:
            break
        count, unit = count / 1024, larger
    if unit == "B":
        return f"{count:.0f} B"
    return f"{count:.{2 if count < 10 else 1 if count < 100 else 0}f} {unit}"


def count_text(count: float) -> str:
    """8512345 → "8.51 M"."""
    for factor, unit in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if count >= factor:
            return f"{count / factor:.2f}{unit}"
    return f"{count:.0f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Columns aligned by spaces: the first `left` to the left, the others (numbers) to the right."""
    cells = [list(header), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "  ".join(
            c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    return "\n".join(line.rstrip() for line in [lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """The same as a Markdown table, aligned in the source too."""
    cells = [list(header), *map(list, rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = (
            c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        return f"| {' | '.join(padded)} |"

    rule = "|".join("-" * (w + 2) if i < left else "-" * (w + 1) + ":" for i, w in enumerate(widths))
    return "\n".join([line(cells[0]), f"|{rule}|", *map(line, cells[1:])])
