"""What all tokens lose alike costs what the model's gradients say, not what independent errors do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from latentkv.plan.allocation import Table
from latentkv_convert.calibrate import copies
from latentkv_convert.fuse import energy
from latentkv_convert.ir import Basis
from latentkv_convert.plan import coherent
from latentkv_convert.plan.allotment import DROP_PENALTY
from latentkv_convert.plan.candidates import FORMATS, Shape

ALONE = 1e-4


def test_a_coordinate_pulls_as_much_as_its_tokens_together() -> None:
    """The gradient by a coordinate's share, of two groups of heads, is in the sums that a text leaves."""
    rng = np.random.default_rng(0)
    rows, slopes = rng.standard_normal((2, 3, 50, 8))
    pairs = [
        copies.crossed(torch.from_numpy(x), torch.from_numpy(g)) for x, g in zip(rows, slopes, strict=True)
    ]
    stats = {f"v_{of}": torch.stack([pair[of] for pair in pairs]).numpy() for of in ("cross", "pull")}
    stats |= {"v_moment": np.eye(8), "v_mean": np.full(8, 2.0)}
    bases = tuple(Basis(np.ones(4), *rng.standard_normal((2, 4, 4))) for _ in range(2))
    head = SimpleNamespace(n_kv=2, head_dim=4)
    head.of_side = lambda side: head
    spec: Any = SimpleNamespace(row_layers=(0,), before_scores=True, at=lambda layer: head)
    work: Any = SimpleNamespace(
        spec=spec, stats={"copies": [stats]}, center=True, sample=SimpleNamespace(tokens=np.zeros((3, 50)))
    )
    work.bases = lambda layer, side, group: bases
    candidate: Any = SimpleNamespace(group=lambda spec, layer, side: 1)
    shape = Shape({"k": "latent", "v": "latent"}, (32,), 4, 128, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coherent, "SIDES", ("v",))
        found = coherent.pulls(work, shape, candidate)[0, "v"]
    about_mean = rows - stats["v_mean"]
    for at, basis in enumerate(bases):
        own = slice(4 * at, 4 * at + 4)
        expected = ((about_mean[..., own] @ basis.down) * (slopes[..., own] @ basis.up.T)).sum(1) / 50**0.5
        assert np.allclose(found[:, own], expected)


@pytest.mark.parametrize("regains", [True, False])
def test_what_all_tokens_lose_is_dearer(regains: bool) -> None:
    """Two segments of 32 channels; one channel of the second has all of the gradients."""
    shape = Shape({"k": "rotated", "v": "latent"}, (32,), 4, 128, None, regains=regains)
    errors = np.array([1e-5, 0.0115, 0.119, 0.363, 1.0]) * ALONE
    table = Table(np.zeros((2, len(FORMATS)), dtype=np.int64), np.stack([errors, errors]))
    pulled = np.zeros((4, 64))
    pulled[:, 40] = [0.1, -0.2, 0.1, 0.2]
    found = coherent._counted(table, pulled, (32, 32), shape).distortion
    few, many = found * [1, 1, 1, 1, DROP_PENALTY]
    assert few == pytest.approx(errors)  # a segment that pulls nothing costs at least what it did
    together = (0.05 + coherent.PRIOR * DROP_PENALTY * ALONE) / (4 + coherent.PRIOR)
    assert many[-1] == pytest.approx(together)
    taken = [energy.taken(name, regains) for name in ("q8", "q4", "q2", "q1")]
    assert many[:-1] == pytest.approx(errors[:-1] + np.square(taken) * (together - ALONE))
    assert taken == sorted(taken)
    assert taken[-1] == pytest.approx(0.2 if regains else 0.36, abs=0.01)
