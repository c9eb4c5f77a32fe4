"""Print requirement lists of pyproject.toml, one per line: `build`, `runtime`, or the name of an extra.

Versions then live in pyproject.toml alone, and `pip install --no-build-isolation` (the only way to an
incremental native build) gets the same tools as an isolated one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def load_pyproject() -> dict[str, Any]:
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        from pip._vendor import tomli as tomllib
    path = Path(__file__).resolve().parent.parent / "pyproject.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


def requirements(pyproject: dict[str, Any], name: str) -> list[str]:
    if name == "build":
        # scikit-build-core asks for cmake only when it is missing, and only under isolation
        return [*pyproject["build-system"]["requires"], "cmake>=3.21"]
    if name == "runtime":
        return list(pyproject["project"]["dependencies"])
    extras = pyproject["project"]["optional-dependencies"]
    if name not in extras:
        raise SystemExit(f"error: [requirements] expected build, runtime, {', '.join(extras)}; got {name}")
    return list(extras[name])


if __name__ == "__main__":
    pyproject = load_pyproject()
    for name in sys.argv[1:]:
        print("\n".join(requirements(pyproject, name)))
