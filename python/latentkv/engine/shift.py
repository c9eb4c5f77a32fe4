"""Tokens that change their positions in the cache, which keys have to allow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from latentkv.errors import expected

if TYPE_CHECKING:
    from latentkv import _core


@dataclass(frozen=True)
class Shift:
    """What becomes of a sequence at the end of its context: the first `n_keep` tokens stay, half of the
    others are forgotten."""

    n_keep: int

    @staticmethod
    def of(model: _core.Model, n_keep: int, sink: int = 0) -> Shift:
        """Raises LatentKVError where keys cannot move: their positions are in the cached rows."""
        require_movable_keys("--context-shift", model)
        return Shift(max(n_keep, sink))


def require_all_tokens(where: str, session: _core.Session) -> None:
    """Raises LatentKVError under eviction: some tokens are gone, and the others stand for them."""
    if session.evict != "none":
        raise expected(where, "all tokens in the cache", f"--evict {session.evict}", "leave one out")


def require_movable_keys(where: str, model: _core.Model) -> None:
    """Raises LatentKVError where the positions of keys are in the cached rows."""
    if any(layer["mixer"] != "attention" for layer in model.layers):
        raise expected(where, "a model whose layers all attend", "recurrent layers, whose state cannot move")
    paths = sorted({layer["k"]["path"] for layer in model.layers} - {"rebuild"})
    if paths:
        turns = any(layer["key_only"] for layer in model.layers)  # in rows that are keys and values (MLA)
        hint = "leave it out" if turns else "convert with --prefer size, or leave it out"
        raise expected(where, "K that is rebuilt at its position", f"K path {paths[0]}", hint)
