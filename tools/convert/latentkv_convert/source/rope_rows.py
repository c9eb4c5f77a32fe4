"""The row order of GGUF's `norm` RoPE pairing: transformers rotates planes (i, i + n/2), the file (2i, 2i +
1)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def paired_rows(n_heads: int, head_dim: int, n_rot: int) -> NDArray[np.int64]:
    """Source row of every file row: file rows 2i and 2i+1 of a head are its rows i and i + n_rot/2.

    Applies to the head dimensions of W_q, W_k, their biases, B_k and E; never to a latent's own axis.
    """
    head = np.arange(head_dim)
    head[:n_rot] = np.arange(n_rot).reshape(2, n_rot // 2).T.reshape(-1)
    rows: NDArray[np.int64] = (np.arange(n_heads)[:, None] * head_dim + head[None, :]).reshape(-1)
    return rows
