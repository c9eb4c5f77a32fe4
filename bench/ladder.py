"""One table of a real model: what every cache costs at every rung of bytes.

    python bench/ladder.py MODEL [--device cuda] [--plot] [--only REGEX]

MODEL is a name of bench/inputs/real_models.py, a GGUF or a checkpoint. Rungs are 28, 17.5, 14, 11 and 8.5 %
of the f16 cache for `waterfill` and the published methods. Beside them are stock caches (llama.cpp's own
too, where `ladder/llama_cpp` is built), caches of few bits with exact windows, and OSCAR. Per cell:
true bytes, divergence from f16 rows, perplexity, hidden numbers found at three depths, and how soon long
answers part from those of f16. llama.cpp's rows have divergence and perplexity alone, against its own f16,
and that against ours. Every cell is a process of its own and is written to bench/results/ladder-NAME.json
when it ends; the same command goes on where it was stopped. Texts are the Python reference
(bench/inputs/texts.py) unless --calib and --text name others.

Weights are dequantized to f16: products with quantized ones round activations to 8 bits, and two f16 caches
of SmolLM2's Q4_1 file that differ in the batch size alone are 0.003 nats apart, more than many a cell. f16's
own row says how far apart they are.
"""

from __future__ import annotations

import sys

from ladder.climb import Ladder  # the folder of the same name, which Python finds first
from ladder.options import parse

if __name__ == "__main__":
    sys.exit(Ladder(parse(__doc__)).run())
