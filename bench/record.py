"""One measured table as JSON: the command that makes it, the machine it ran on, columns and rows.

`bench/tables.py` turns such a file into the README table of the same name.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


@dataclass(frozen=True)
class Column:
    key: str
    label: str
    format: str = ""  # a format spec such as ".3f"; empty: as it is
    unit: str = ""  # written behind the value


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")  # Linux
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    for line in lines:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def commit() -> str:
    """Short hash of the checked-out commit, `+` when the tree differs from it; outside git what
    LATENTKV_COMMIT says, else `unknown`."""
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        diff = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "native", "python", "tools"], cwd=ROOT)
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("LATENTKV_COMMIT", "unknown")
    return head.stdout.strip() + ("+" if diff.returncode else "")


def environment() -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "commit": commit(),
    }


def save(
    path: Path,
    *,
    command: str,
    columns: list[Column],
    rows: list[dict[str, Any]],
    note: str = "",
    cells: list[dict[str, Any]] | None = None,
    **more: Any,
) -> None:
    """Writes the file atomically; `command` is what a reader types in the root to get it again, `more` is
    kept beside the table, and so are `cells`, one a line."""
    result = {
        "command": command,
        "note": note,
        "environment": environment(),
        "columns": [asdict(column) for column in columns],
        "rows": rows,
    } | more
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    text = json.dumps(result, indent=2, ensure_ascii=False)
    if cells is not None:
        lines = ",\n".join(f"    {json.dumps(each, ensure_ascii=False)}" for each in cells)
        text = f'{text[:-2]},\n  "cells": [\n{lines}\n  ]\n}}'
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(path)


def finished(path: Path, command: str, restart: bool) -> list[dict[str, Any]]:
    """The rows that an earlier run of the same command has written; exits when another command wrote them."""
    if restart or not path.exists():
        return []
    old = json.loads(path.read_text(encoding="utf-8"))
    if old["command"] != command:
        raise SystemExit(
            f"error: [--save] expected results of `{command}`; got those of `{old['command']}` in "
            f"{path.name}; choose another name or pass --restart"
        )
    rows: list[dict[str, Any]] = old["rows"]
    return rows


def cell(value: Any, spec: str) -> str:
    """A value as it is printed while rows come in."""
    return "–" if value is None else format(value, spec)


def shown(path: Path) -> str:
    """A path as a reader types it in the root; the bare name of what lies outside."""
    path = path.resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
