"""The caches that a task is solved with: formats of the model's own file, and converted files."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from inputs import real_models

NAMES = "f16,q8_0,q4_0,small,28%,14%,11%,8.5%"
AGAIN = "f16-again"
SERVED = 32768  # tokens at which whole caches are compared


def converted(model: Path, file: Path, options: list[str]) -> None:
    """Makes a file that is not there yet with `latentkv convert`."""
    if file.exists():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "latentkv", "convert", str(model), "-o", str(file), "--no-plot", *options]
    if subprocess.run(words).returncode:
        raise SystemExit(f"error: [tasks] expected {file.name} to be converted")


@dataclass(frozen=True)
class Cache:
    """A row of a result. budget: of a converted file, ""  for the model's own."""

    name: str
    file: Path
    options: tuple[str, ...] = ()
    budget: str = ""

    @property
    def label(self) -> str:
        if self.name == AGAIN:
            return "f16, half as many at a time"
        return f"converted, {self.budget.replace('%', ' %')}" if self.budget else self.name

    def make(self, model: Path, device: str) -> None:
        """Converts where the file is not there yet."""
        converted(model, self.file, ["--kv-budget", self.budget, "--device", device])

    def share(self, model: Path) -> float:
        """Of the f16 cache's bytes, per cent."""
        from latentkv import _core
        from latentkv.plan.master import planned

        full = _core.Model(str(model)).forecast(SERVED, kv="f16")["total"]
        own = _core.Model(str(self.file))
        options = {} if self.budget else planned(own, {"kv": self.options[1]})
        return float(100 * own.forecast(SERVED, **options)["total"] / full)


def command(description: str | None) -> argparse.ArgumentParser:
    """The options of every program that measures a model's caches."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("model", help=f"{', '.join(real_models.MODELS)} or a GGUF")
    made.add_argument("--caches", default=NAMES, help="f16 first (default: %(default)s)")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--name", help="of the model in file names (default: its own)")
    made.add_argument("--work", type=Path, default=Path("build/tasks"), help="where files go")
    made.add_argument("-t", "--threads", type=int, default=0)
    made.add_argument("--save", metavar="NAME", help="writes bench/results/tasks/NAME.json")
    made.add_argument("--out", type=Path, help="the same, anywhere")
    return made


def caches(names: str, model: Path, work: Path, name: str) -> list[Cache]:
    """f16,14%,…: a share of f16 is a file of its own below `work`."""
    found = []
    for each in names.split(","):
        if each.endswith("%"):
            budget = each.removesuffix("%")
            if not re.fullmatch(r"\d+(\.\d+)?", budget):
                raise SystemExit(f"error: [--caches] expected a share such as 14%; got {each}")
            found.append(Cache(each, work / f"{name}-{budget}.gguf", budget=each))
        else:
            found.append(Cache(each, model, ("--kv", "f16" if each == AGAIN else each)))
    return found


def scale(cache: Cache, parallel: int) -> int:
    return max(1, parallel // 2) if cache.name == AGAIN else parallel
