"""Sessions that are filled side by side: of a file as it is, of a fixed window, of the plain model in f16."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from command import arguments
from latentkv import _core
from latentkv.plan.master import planned
from record import RESULTS, Column, cell, save


@dataclass(frozen=True)
class Cache:
    """NAME=FILE or NAME=FILE:WORD,WORD: `fixed`, `exact-FORMAT` of exact rows, `read-N` of --kv-read, or a
    cache type."""

    name: str
    file: str
    kv: str = ""
    fixed: bool = False
    exact: str = ""
    read: int = 0

    @classmethod
    def parse(cls, text: str) -> Cache:
        name, _, rest = text.partition("=")
        file, _, words = rest.partition(":")
        found: dict[str, str] = {}
        others = []
        for word in filter(None, words.split(",")):
            key, _, value = word.partition("-")
            if word == "fixed" or key in ("exact", "read"):
                found[key] = value
            else:
                others.append(word)
        if not name or not file or len(others) > 1:
            raise SystemExit(f"error: [fill] expected NAME=FILE[:KV,fixed]; got {text!r}")
        kv = others[0] if others else ""
        return cls(name, file, kv, "fixed" in found, found.get("exact", ""), int(found.get("read", 0)))


def program(description: str | None, context: int, layers: int) -> argparse.ArgumentParser:
    """The options of every program here."""
    of = arguments(description)
    of.add_argument("caches", nargs="+", help="NAME=FILE[:KV,fixed]")
    of.add_argument("-c", "--context", type=int, default=context)
    of.add_argument("--ngl", type=int, default=layers)
    of.add_argument("--save", help="bench/results/fill/NAME.json")
    of.add_argument("--out", type=Path, help="the same, anywhere")
    return of


class Table:
    """Rows that are shown as they come, and written at the end where the arguments ask for that."""

    def __init__(self, columns: list[Column]) -> None:
        self.columns = columns
        self.rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print(" ".join(cell(row[column.key], column.format) for column in self.columns), flush=True)

    def keep(self, args: argparse.Namespace, program: str, note: str) -> None:
        out = args.out or (RESULTS / "fill" / f"{args.save}.json" if args.save else None)
        if out is not None:
            command = f"python bench/fill/{program}.py"
            save(out, command=command, columns=self.columns, rows=self.rows, note=note)


def session(model: _core.Model, cache: Cache, n_ctx: int, **options: Any) -> Any:
    asked: dict[str, Any] = {"n_ctx": n_ctx, "fixed_window": cache.fixed, "prefill": "eager"} | options
    asked |= {"kv_read": cache.read} if cache.read else {}
    if cache.exact:
        asked |= {"kv_recent": cache.exact, "kv_sink": cache.exact}
    return _core.Session(model, **planned(model, asked | ({"kv": cache.kv} if cache.kv else {})))


def opened(caches: list[Cache], layers: int, weights: str) -> dict[str, Any]:
    """Models by their files, each opened once."""
    files = dict.fromkeys(cache.file for cache in caches)
    return {file: _core.Model(file, n_gpu_layers=layers, weights=weights) for file in files}


def exact(session: Any) -> int:
    """Tokens that are exact now."""
    regions = {region["name"]: region["used"] for region in session.kv_bytes()["regions"]}
    return int(sum(regions.values()) - regions["middle"])
