"""How much memory is free."""

from __future__ import annotations

import re
from pathlib import Path

from latentkv import _core
from latentkv.errors import expected

_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_on_host(root: Path = Path("/")) -> int:
    """Bytes that processes may still take without swapping: MemAvailable of Linux, or less where a control
    group's limit leaves less.

    Raises:
        LatentKVError: another system.
    """
    try:
        info = (root / "proc/meminfo").read_text(encoding="ascii")
        available = int(re.findall(r"^MemAvailable: +(\d+) kB$", info, re.MULTILINE)[0]) << 10
    except (OSError, IndexError):
        raise expected(
            "auto", "Linux's /proc/meminfo, which says what is free", "none", "give numbers"
        ) from None
    return min([available, *_left_by_groups(root)])


def _left_by_groups(root: Path) -> list[int]:
    """What the limits of this process's control group and of those above it leave; pages of files that can
    go are free."""
    left = []
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        names = _V1 if controllers else _V2
        folder = base / path.lstrip("/")
        for group in (folder, *folder.parents):
            if group.is_relative_to(base) and (room := _left(group, *names)) is not None:
                left.append(room)
    return left


def _left(group: Path, limit: str, usage: str, inactive: str) -> int | None:
    try:
        most = int((group / limit).read_text(encoding="ascii"))
        used = int((group / usage).read_text(encoding="ascii"))
        stat = (group / "memory.stat").read_text(encoding="ascii")
    except (OSError, ValueError):  # no such group, or no limit: "max"
        return None
    files = re.findall(rf"^{inactive} (\d+)$", stat, re.MULTILINE)
    return max(0, most - used + int(files[0] if files else 0))


def free_on_gpus() -> list[int]:
    """Bytes of each; none: this build has no GPU, or finds no device."""
    return [free for free, _ in _core.gpu_memory()]
