"""The figures of speed and memory that five papers lead with, in kind: their shape, batch and lengths.

    python bench/papers.py [palu zack lorc tale eigen]

Each paper is a module of bench/papers/: what it claims, and caches that do what its method does. They are
measured beside full f16 rows with flash decoding, all in one run on one GPU; how those stand to llama.cpp's,
bench/gpu/default_files.py measures. Every paper writes bench/results/papers/papers-NAME.json; docs/papers.md
shows them.
"""

from __future__ import annotations

import sys

from papers.run import main  # the folder of the same name, which Python finds first

if __name__ == "__main__":
    sys.exit(main(__doc__))
