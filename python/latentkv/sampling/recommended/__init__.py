"""How the makers of a file sample: `general.sampling.*`, llama.cpp's keys, as options under their names here.
They count where neither a flag nor a request says otherwise."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from latentkv import ranges
from latentkv.console.printable import printable
from latentkv.errors import LatentKVError
from latentkv.sampling.options import NAMES, SamplingOptions
from latentkv.sampling.order import with_samplers

_SEQUENCE = f"{ranges.SAMPLING_PREFIX}sequence"  # the samplers of the chain


def recommended(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a file's keys. A value that no option takes is left out, with a warning."""
    found: dict[str, Any] = {}
    for name, (option, _) in ranges.SAMPLING.items():
        key = ranges.SAMPLING_PREFIX + name
        try:
            if key in metadata:
                found[option] = ranges.recommended(key, name, metadata[key])
        except LatentKVError as error:
            _warn(error)
    try:
        return found | _chain(found, str(metadata.get(_SEQUENCE, "")))
    except LatentKVError as error:
        _warn(f"[{_SEQUENCE}] {str(error).partition('] ')[2]}")
        return found


def _chain(found: Mapping[str, Any], sequence: str) -> dict[str, Any]:
    """What turns samplers off that the file does not list."""
    if not sequence:
        return {}
    usual = SamplingOptions()
    made = with_samplers(SamplingOptions(**found), sequence.split(";"))
    names = [name for name in NAMES if name in found or getattr(made, name) != getattr(usual, name)]
    return {name: getattr(made, name) for name in names}


def _warn(message: object) -> None:
    print(f"warning: {printable(str(message))}; left out", file=sys.stderr)
