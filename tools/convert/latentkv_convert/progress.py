"""Progress bars on standard error; silent when it is not a terminal."""

from __future__ import annotations

from typing import Any

from .errors import need


def bar(total: int, label: str, unit: str = "layer") -> Any:
    """A context manager with update(n)."""
    return need("tqdm").tqdm(
        total=total, desc=label, unit=unit, disable=None, leave=False, dynamic_ncols=True
    )
