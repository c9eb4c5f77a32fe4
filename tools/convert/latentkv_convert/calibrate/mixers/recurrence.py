"""The recurrences of transformers, which are its models' own functions."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ...errors import ConvertError, need


def recurrence(module: str, name: str) -> Any:
    """The function `name` of transformers.models.`module`.

    Raises:
        ConvertError: transformers has no such function.
    """
    need("transformers")
    where = f"transformers.models.{module}"
    try:
        return getattr(import_module(where), name)
    except (ImportError, AttributeError) as error:
        raise ConvertError("convert", f"a transformers with {where}", str(error), "upgrade it") from None
