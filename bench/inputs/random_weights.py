"""Random tensors, seeded. Large ones are parts of one long row of blocks, which takes no time."""

from __future__ import annotations

import gguf
import numpy as np

Type = gguf.GGMLQuantizationType


def q4_0_blocks(random: np.random.Generator, n: int) -> np.ndarray:
    """[n, 18] bytes: 32 values of standard deviation 0.02 each."""
    blocks = random.integers(0, 256, (n, 18), dtype=np.uint8)
    scales = (random.uniform(0.5, 1.5, n) * 0.02 / 4.6).astype(np.float16)
    blocks[:, :2] = scales.view(np.uint8).reshape(n, 2)
    return blocks


def q4_k_blocks(random: np.random.Generator, n: int) -> np.ndarray:
    """[n, 144] bytes: 256 values of mean 0 and standard deviation 0.02 each."""
    blocks = random.integers(0, 256, (n, 144), dtype=np.uint8)
    # value = scale s q - minimum m, with s and m from 0 to 63, q from 0 to 15
    scale = random.uniform(0.5, 1.5, n) * 0.02 / 250
    both = np.stack([scale, 7.5 * scale], axis=1).astype(np.float16)
    blocks[:, :4] = both.view(np.uint8)
    return blocks


# type -> values of a block, and who makes blocks
BLOCKS = {"Q4_0": (32, q4_0_blocks), "Q4_K": (256, q4_k_blocks)}


class Weights:
    """Tensors of one type. `largest`: values of the largest."""

    def __init__(self, seed: int, kind: str, largest: int) -> None:
        self.random = np.random.default_rng(seed)
        self.type = Type[kind]
        self.n_values, make = BLOCKS[kind]
        self.blocks = make(self.random, (1 << 25) // self.n_values)
        n_rest = -(-largest // self.n_values)
        self.repeated = np.resize(self.blocks, (len(self.blocks) + n_rest, self.blocks.shape[1]))

    def quantized(self, n_out: int, n_in: int) -> np.ndarray:
        """[n_out, n_in] of standard deviation 0.02, as bytes of rows."""
        n = n_out * n_in // self.n_values
        first = int(self.random.integers(0, len(self.blocks)))
        return self.repeated[first : first + n].reshape(n_out, -1)

    def f16(self, *shape: int, scale: float) -> np.ndarray:
        """Normal values of this standard deviation."""
        return (self.random.standard_normal(shape, dtype=np.float32) * scale).astype(np.float16)
