"""Gather the pages of the documentation site: docs_pages.py OUT

Pages link to each other and to results by their places in the repository, so they keep them; mkdocs.yml says
which of them the menu shows.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATTERNS = (
    "*.md",
    "LICENSE",
    "docs/**/*.md",
    "docs/**/*.png",
    "bench/README.md",
    "bench/results/**/*.json",
    "bench/results/**/*.png",
    "native/src/ops/cuda/README.md",
)


def gather(out: Path) -> int:
    """Copies them anew; how many."""
    shutil.rmtree(out, ignore_errors=True)
    found = sorted({path for pattern in PATTERNS for path in ROOT.glob(pattern)})
    for path in found:
        to = out / path.relative_to(ROOT)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, to)
    return len(found)


if __name__ == "__main__":
    print(f"{gather(Path(sys.argv[1]))} files")
