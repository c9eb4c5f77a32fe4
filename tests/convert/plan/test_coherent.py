"""What all tokens lose alike costs what the model's gradients say, not what independent errors do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from latentkv.plan.allocation import Table
from latentkv_convert.fuse import energy
from latentkv_convert.plan import coherent
from latentkv_convert.plan.allotment import DROP_PENALTY
from latentkv_convert.plan.candidates import FORMATS, Shape

ALONE = 1e-4


def test_rows_are_whole_and_gradients_are_what_a_coordinate_gives() -> None:
    rows, slopes, down = torch.randn(50, 8), torch.randn(50, 8), torch.randn(8, 8)
    found = coherent.Dropped.__new__(coherent.Dropped)
    found.mean, found.factors = torch.ones(8), [(down[:4, :4], down[:4, 4:]), (down[4:, :4], down[4:, 4:])]
    found.shares = [torch.zeros(8, requires_grad=True) for _ in range(3)]
    own = found.noting(1)
    assert torch.equal(own(rows), rows)
    (own(rows) * slopes).sum().backward()
    parts = (rows - 1).unflatten(1, (2, 4)), slopes.unflatten(1, (2, 4))
    for group, (encode, decode) in enumerate(found.factors):
        x, g = (part[:, group] for part in parts)
        expected = -((x @ encode) * (g @ decode.T)).sum(0)
        assert found.shares[1].grad is not None
        torch.testing.assert_close(found.shares[1].grad[4 * group :][:4], expected)
    assert found.shares[0].grad is None
    assert len(found.taken(3)) == 1
    assert found.shares[1].grad is None


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
