"""A text to calibrate on and one to measure on, which every machine with Python has: its language reference.

    python bench/inputs/texts.py FOLDER

writes calib.txt and held-out.txt there. `pydoc_data` keeps the reference's chapters for `help("if")` and the
like, some 460,000 characters of technical English with code. Chapters are dealt to one side or the other by a
hash of their name, a quarter of the text to the held-out one. Python versions differ by a few sentences, so
results carry digest().
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

from latentkv_convert.calibrate.text import mix


def chapters() -> tuple[list[str], list[str]]:
    """To calibrate on, held out."""
    return mix.chapters(False), mix.chapters(True)


def digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


def write(folder: Path) -> tuple[Path, Path]:
    """The two files, written anew."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "calib.txt", folder / "held-out.txt"
    for path, parts in zip(paths, chapters(), strict=True):
        path.write_text("\n".join(parts), encoding="utf-8")
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    for path in write(parser.parse_args().folder):
        print(path)


if __name__ == "__main__":
    main()
