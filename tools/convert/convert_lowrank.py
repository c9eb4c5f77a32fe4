#!/usr/bin/env python3
"""Converts a GGUF or a Hugging Face checkpoint to a latentkv GGUF; the same as `latentkv convert`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(
    str(Path(__file__).parents[2] / "python")
)  # what is installed comes first: it has native code

from latentkv_convert.cli import main

if __name__ == "__main__":
    sys.exit(main(prog=Path(__file__).name))
