"""Numbers for people."""

from __future__ import annotations

import math


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


def digits(number: float, count: int) -> str:
    """So many digits that count, never a power of ten: 0.0000123, 2 → "0.000012"."""
    if not number or not math.isfinite(number):
        return f"{number:g}"
    places = max(0, count - 1 - math.floor(math.log10(abs(number))))
    return f"{number:.{places}f}"


def tenths(number: float) -> str:
    """12.5 → "12.5", 12.0 → "12"."""
    return f"{number:.1f}".removesuffix(".0")


def count_text(count: float) -> str:
    """8512345 → "8.51 M"."""
    for factor, unit in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if count >= factor:
            return f"{count / factor:.2f}{unit}"
    return f"{count:.0f}"
