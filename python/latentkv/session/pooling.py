"""Which pooling makes an embedding: what was asked for, or what the file says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from latentkv.errors import expected
from latentkv.ranges import Range

POOLINGS = ("none", "mean", "cls", "last")  # each at its number in llama.h, enum llama_pooling_type
_RANK = 4  # a score head, which no decoder here has
NORMS = Range(-1)  # the number of a norm: see normalized()


def pooling_of(metadata: Mapping[str, Any]) -> str | None:
    """The pooling that the file asks for with its key ARCHITECTURE.pooling_type; None: it has no such key."""
    key = f"{metadata.get('general.architecture')}.pooling_type"
    if key not in metadata:
        return None
    return pooling_name(key, int(metadata[key]))


def pooling_name(where: str, value: int | str) -> str:
    """A name of POOLINGS, from that name or from llama.cpp's number."""
    if value in POOLINGS:
        return str(value)
    if value in (_RANK, "rank"):
        raise expected(where, " or ".join(POOLINGS), "rank", "models here have no score head")
    if isinstance(value, int) and 0 <= value < len(POOLINGS):
        return POOLINGS[value]
    numbers = f"{' or '.join(POOLINGS)}, or a number from 0 to {len(POOLINGS) - 1}"
    raise expected(where, numbers, repr(value))


def chosen(asked: str | None, metadata: Mapping[str, Any], default: str = "none") -> str:
    """The pooling that was asked for, else the file's, else the default."""
    return asked or pooling_of(metadata) or default
