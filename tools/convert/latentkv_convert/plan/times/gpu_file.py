"""The file of one GPU's times: what was measured, how, and the coefficients fitted to it.

`bench/attention_times.py` writes one; `convert --gpu-times FILE` reads it.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from latentkv.console.reading import read_text

from ...errors import ConvertError
from ...ir import LayerPlan, SidePlan
from . import features
from .features import UNITS, Times
from .fit import fit

SHIPPED = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.json"))}
DEFAULT = SHIPPED["h100"]  # where no GPU is
LEAST_KB = 48  # that the kernels want of any GPU
_SIZES = ("name", "source", "n_layer", "n_head", "n_kv", "head_dim")  # of Measured, as they are in a file
_WHAT = "a file that bench/attention_times.py wrote"


@dataclass(frozen=True)
class Measured:
    """One file of a shape whose layers and groups are alike, and its times by depth."""

    name: str
    source: str  # the table or the run that its times come from
    n_layer: int
    n_head: int
    n_kv: int
    head_dim: int
    layer: LayerPlan
    us: Mapping[int, float]  # depth -> microseconds a layer

    def points(self, shared_kb: int = features.SHARED_KB) -> list[tuple[Mapping[str, float], float]]:
        counted = features.of(self, self.layer, shared_kb)
        if counted is None:
            raise ConvertError(self.name, "rows that the GPU's kernels take", str(self.layer))
        return [(counted.at(depth), us) for depth, us in self.us.items()]

    def as_dict(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in _SIZES},
            "k": _side_as_dict(self.layer.k),
            "v": _side_as_dict(self.layer.v),
            "us": {str(depth): round(us, 2) for depth, us in self.us.items()},
        }

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Measured:
        k, v = (side_of(entry["n_kv"], **entry[name]) for name in ("k", "v"))
        layer = LayerPlan(k, v)
        us = {int(depth): float(time) for depth, time in entry["us"].items()}
        return cls(**{name: entry[name] for name in _SIZES}, layer=layer, us=us)


def side_of(n_kv: int, path: str, group: int = 1, segments: Any = ()) -> SidePlan:
    """K or V whose groups all have these segments: (format, channels)."""
    if path == "full":
        return SidePlan("full")
    formats, widths = zip(*segments, strict=True)
    n = n_kv // group
    return SidePlan(path, group, (sum(widths),) * n, (tuple(widths),) * n, (tuple(formats),) * n)


def _side_as_dict(side: SidePlan) -> dict[str, Any]:
    if side.formats is None:
        return {"path": side.path}
    segments = [list(pair) for pair in zip(side.formats[0], side.segments[0], strict=True)]
    return {"path": side.path, "group": side.group, "segments": segments}


def document(
    gpu: str,
    capabilities: Sequence[str],
    command: str,
    build: str,
    files: list[Measured],
    shared_kb: int = features.SHARED_KB,
) -> dict[str, Any]:
    """The file's content: coefficients are fitted to the files' times. capabilities: compute capabilities of
    the GPUs whose plans it is for; shared_kb: shared memory that a thread block may have there."""
    points = [point for each in files for point in each.points(shared_kb)]
    found = fit(points)
    return {
        "gpu": gpu,
        "capabilities": list(capabilities),
        "shared_kb": shared_kb,
        "time": "microseconds a layer that a decode step of one token takes at a depth beyond depth 0",
        "command": command,
        "build": build,
        "coefficients": {
            name: {"value": round(value, 6), "unit": UNITS[name]}
            for name, value in found.coefficients.items()
        },
        "fit": {
            "points": len(points),
            "worst_relative_error": round(found.worst, 4),
            "median_relative_error": round(found.median, 4),
        },
        "measured": [each.as_dict() for each in files],
    }


@cache
def here() -> str | None:
    """Compute capability of the first GPU of this machine, such as 8.9."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return found.split("\n")[0].strip() or None


def shipped_for(capability: str | None) -> Path:
    """The package's file for GPUs of a compute capability; DEFAULT where none names it."""
    for path in SHIPPED.values():
        if capability in json.loads(path.read_text(encoding="utf-8"))["capabilities"]:
            return path
    return DEFAULT


def load(path: Path | None) -> Times:
    """The times in a file, or of one of SHIPPED by its name; None: for the GPU of this machine.

    Raises:
        ConvertError: there is no such file, or something else is in it.
    """
    path = shipped_for(here()) if path is None else SHIPPED.get(str(path), path)
    try:
        found = json.loads(read_text(path, "--gpu-times"))
    except OSError as error:
        raise ConvertError("--gpu-times", f"{_WHAT} at {path}", error.strerror or str(error)) from None
    except ValueError:
        raise ConvertError("--gpu-times", f"{_WHAT}, in JSON", str(path)) from None
    if not isinstance(found, dict) or not isinstance(found.get("gpu"), str):
        raise ConvertError("--gpu-times", f'{_WHAT}, with "gpu"', str(path))
    entries = found.get("coefficients")
    if not isinstance(entries, dict) or not entries:
        raise ConvertError("--gpu-times", f'{_WHAT}, with "coefficients"', str(path))
    shared_kb = found.get("shared_kb", features.SHARED_KB)
    if not isinstance(shared_kb, int) or not LEAST_KB <= shared_kb <= features.SHARED_KB:
        wanted = f'{_WHAT}, with "shared_kb" of {LEAST_KB} to {features.SHARED_KB}'
        raise ConvertError("--gpu-times", wanted, str(shared_kb)[:60])
    coefficients = {name: _coefficient(name, entry) for name, entry in entries.items()}
    return Times(found["gpu"], coefficients, shared_kb)


def _coefficient(name: str, entry: Any) -> float:
    unit = UNITS.get(name)
    if unit is None:
        raise ConvertError("--gpu-times", f"coefficients of {', '.join(UNITS)}", name[:60])
    value: Any = entry.get("value") if isinstance(entry, dict) else None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < 0 or entry.get("unit") != unit:
        wanted = f'"{name}" as {{"value": a number from 0, "unit": "{unit}"}}'
        raise ConvertError("--gpu-times", wanted, json.dumps(entry)[:80])
    return float(value)
