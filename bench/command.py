"""Runs `latentkv` commands as a user would, with the command line shown; a failing one ends the program."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A program's, with its docstring as it stands."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def latentkv(*args: str, capture: bool = False) -> str:
    """Standard output when captured, else empty. Runs in the repository's root."""
    print(f"\n$ latentkv {shlex.join(args)}", flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "latentkv", *args],
        cwd=ROOT,
        stdout=subprocess.PIPE if capture else None,
        text=True,
    )
    if done.returncode:
        raise SystemExit(done.returncode)
    return done.stdout or ""


def score(gguf: Path, text: Path, kv: str, context: int, against: str | None = None) -> dict[str, Any]:
    """Perplexity and, against another cache, KLD (nats per token) and the share of equal top tokens."""
    args = ["perplexity", str(gguf), "-f", str(text), "-c", str(context), "--json"]
    if kv:
        args += ["--kv", kv]
    if against:
        args += ["--kld-against", against]
    result = json.loads(latentkv(*args, capture=True))
    return {
        "file": gguf.stem,
        "kv": kv or "plan",
        "bytes": result["kv_bytes_per_token"],
        "ppl": result["ppl"],
        "kld": result["kld"]["mean"] if against else None,
        "same_top": result["same_top"] if against else None,
    }
