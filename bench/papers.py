"""The figures of speed and memory that five papers lead with, in kind: their shape, batch and lengths.

    python bench/papers.py [palu zack lorc tale eigen] [--llama-bench PATH]

Each paper is a module of bench/papers/: what it claims, and caches that do what its method does. They are
measured beside full f16 rows of ours with flash decoding and, with --llama-bench, beside llama.cpp's, all in
one run on one GPU. Every paper writes bench/results/papers-NAME.json; docs/papers.md shows them.
"""

from __future__ import annotations

import sys

from papers.run import main  # the folder of the same name, which Python finds first

if __name__ == "__main__":
    sys.exit(main(__doc__))
