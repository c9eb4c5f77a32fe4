"""Numbers for people, and tables for pages."""

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


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table, aligned in its source too; columns as terminal.table() has them."""
    cells = [list(header), *map(list, rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = (
            c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        return f"| {' | '.join(padded)} |"

    rule = "|".join("-" * (w + 2) if i < left else "-" * (w + 1) + ":" for i, w in enumerate(widths))
    return "\n".join([line(cells[0]), f"|{rule}|", *map(line, cells[1:])])
