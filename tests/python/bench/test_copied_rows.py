"""bench/gpu/copied_rows.py: a deep cache holds the rows of a short one, at every position once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gpu.copied_rows import COPIED_FROM, N_BODY, N_HEAD, Copies, regions
from latentkv import _core
from latentkv.plan.master import planned


@pytest.mark.parametrize("kv", ["c4/q4", ""])
def test_copies_stand_at_every_position(plain_gguf: Path, latent_gguf: Path, kv: str) -> None:
    model = _core.Model(str(plain_gguf if kv else latent_gguf))
    depth = COPIED_FROM + 2 * N_BODY
    session = _core.Session(model, n_ctx=depth + 64, n_threads=1, **planned(model, {"kv": kv}))
    tokens = np.random.default_rng(1).integers(0, model.n_vocab, COPIED_FROM)
    session.decode(tokens.tolist(), output="none")
    copies = Copies(session)
    copies.fill(depth)
    assert (session.seq_pos_min(0), session.seq_pos_max(0)) == (0, depth - 1)
    assert session.n_cells_used() == depth
    # the copies' rows are the body's
    sinks = regions(session.seq_state_parts(0, [0, N_HEAD])[0]).get("sink", (0, 0, 0))[2]
    cuts = [0, *(sinks + N_HEAD + i * N_BODY for i in range(4))]
    rows = []
    for part in session.seq_state_parts(0, cuts)[1:4]:
        at, end, n = regions(part)["middle"]
        rows.append(np.frombuffer(part, np.uint8)[at:end].reshape(n, -1)[:, 16:])
        assert n == N_BODY
    assert (rows[0] == rows[1:]).all()
    assert np.isfinite(session.decode([1])).all()
    with pytest.raises(ValueError, match="multiple of 2048 more"):
        copies.fill(depth + 1)
