"""bench/gpu/copied_rows.py: a deep cache holds the rows of a short one, at every position once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gpu import copied_rows
from gpu.copied_rows import Copies, regions
from latentkv import _core
from latentkv.plan.master import planned


@pytest.mark.parametrize("kv", ["c4/q4", ""])
def test_copies_stand_at_every_position(
    plain_gguf: Path, latent_gguf: Path, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_head, n_body, first = 64, 128, 640  # fewer than a benchmark's
    for name, n in {"N_HEAD": n_head, "N_BODY": n_body, "COPIED_FROM": first}.items():
        monkeypatch.setattr(copied_rows, name, n)
    model = _core.Model(str(plain_gguf if kv else latent_gguf))
    depth = first + 2 * n_body
    session = _core.Session(model, n_ctx=depth + 64, n_threads=1, **planned(model, {"kv": kv}))
    tokens = np.random.default_rng(1).integers(0, model.n_vocab, first)
    session.decode(tokens.tolist(), output="none")
    copies = Copies(session)
    copies.fill(depth)
    assert (session.seq_pos_min(0), session.seq_pos_max(0)) == (0, depth - 1)
    assert session.n_cells_used() == depth
    # the copies' rows are the body's
    sinks = regions(session.seq_state_parts(0, [0, n_head])[0]).get("sink", (0, 0, 0))[2]
    cuts = [0, *(sinks + n_head + i * n_body for i in range(4))]
    rows = []
    for part in session.seq_state_parts(0, cuts)[1:4]:
        at, end, n = regions(part)["middle"]
        rows.append(np.frombuffer(part, np.uint8)[at:end].reshape(n, -1)[:, 16:])
        assert n == n_body
    assert (rows[0] == rows[1:]).all()
    assert np.isfinite(session.decode([1])).all()
    with pytest.raises(ValueError, match="multiple of 128 more"):
        copies.fill(depth + 1)
