"""Which of the native modules this processor runs.

A wheel has one per instruction set (native/levels.cmake), a build from source one for its own machine,
`native`; each is in a folder `levels/NAME` beside this file. LATENTKV_CPU names another than the greatest
that runs here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from latentkv.errors import LatentKVError

VARIABLE = "LATENTKV_CPU"
FOLDER = Path(__file__).parent / "levels"
# What a level asks for, in words of /proc/cpuinfo. Linux leaves out what it does not save on a switch.
_X86_V2 = frozenset({"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"})
_X86_V3 = _X86_V2 | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}
_X86_V4 = _X86_V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_ARM_V8 = frozenset({"asimd"})
NEEDS: dict[str, frozenset[str]] = {  # greatest first
    "native": frozenset(),
    "x86-64-v4-vnni": _X86_V4 | {"avx512_vnni"},
    "x86-64-v3": _X86_V3,
    "x86-64-v2": _X86_V2,
    "armv8.2-a-dotprod": _ARM_V8 | {"asimddp", "fphp", "asimdhp"},
    "armv8-a": _ARM_V8,
}


def features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """What the first processor can; empty where the system does not say."""
    try:
        with cpuinfo.open(encoding="utf-8") as lines:
            for line in lines:
                name, _, words = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    return frozenset(words.split())
    except OSError:
        pass
    return frozenset()


def usable(levels: Iterable[str], can: frozenset[str]) -> list[str]:
    """Those of the levels that a processor with these features runs, greatest first."""
    offered = set(levels)
    return [name for name, needs in NEEDS.items() if name in offered and needs <= can]


def built(folder: Path = FOLDER) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def chosen(levels: list[str], can: frozenset[str], asked: str | None) -> str:
    """The level to load.

    Raises:
        LatentKVError: LATENTKV_CPU names none that runs here, or the processor is older than the least one.
    """
    here = usable(levels, can)
    if not here:
        raise LatentKVError(
            f"[processor] expected one that runs {' or '.join(levels)}; got none of them in /proc/cpuinfo; "
            "build from source: pip install --no-binary latentkv latentkv"
        )
    if asked is not None and asked not in here:
        raise LatentKVError(f"[{VARIABLE}] expected {' or '.join(here)}, which run here; got {asked!r}")
    return asked or here[0]


def folder() -> Path:
    """The folder of the module that this process loads. Where none was built, it does not exist."""
    levels = built()
    return FOLDER / (chosen(levels, features(), os.environ.get(VARIABLE)) if levels else "native")
