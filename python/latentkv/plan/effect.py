"""Refuses cache options that would have no effect."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from latentkv.errors import expected
from latentkv.plan.options import SessionOptions

if TYPE_CHECKING:
    from latentkv import _core


def require_effect(session: _core.Session, options: SessionOptions) -> None:
    """Raises LatentKVError for an option of the session that has no effect."""
    require_regions([region["name"] for region in session.kv_bytes()["regions"]], options)
    if not options.kv_rotate and not session.can_rotate:
        got = "none that is quantized row by row"
        raise expected("--no-kv-rotate", "full K or V in formats as q8_0", got, "pass --kv, or leave it out")


def require_regions(names: Collection[str], options: SessionOptions) -> None:
    """Raises LatentKVError for a row format of a region that the cache lacks. names: of its regions."""
    for name in ("sink", "recent"):
        if options[f"kv_{name}"] and name not in names:
            hint = f"pass --{name}, or leave it out"
            raise expected(f"--kv-{name}", f"{name} tokens, whose format it is", "none", hint)
