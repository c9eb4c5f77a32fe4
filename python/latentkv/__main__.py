"""`python -m latentkv` is the command `latentkv`."""

import sys

from latentkv.cli import main

if __name__ == "__main__":
    sys.exit(main())
