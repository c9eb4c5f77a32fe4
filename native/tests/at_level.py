"""Runs a program that was built for a level; status 77 (skipped) where this processor does not have it.

python at_level.py LEVEL PROGRAM
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

from latentkv import processor

level, program = sys.argv[1:]
if level not in processor.usable(processor.NEEDS, processor.features()):
    print(f"skipped: this processor has no {level}")
    sys.exit(77)
os.execv(program, [program])
