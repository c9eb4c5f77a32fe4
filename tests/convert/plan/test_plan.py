"""Plans that a reader would refuse are refused before a file is written."""

from __future__ import annotations

import pytest
from tiny_models import TINY

from latentkv_convert.errors import ConvertError
from latentkv_convert.ir import FULL, LayerPlan, Plan, SidePlan
from latentkv_convert.source import archs
from latentkv_convert.write.check import check_plan

SPEC = archs.model_spec(TINY["llama"])  # 3 layers, 2 KV heads of 32
GOOD = SidePlan("latent", 2, (48,), ((32, 16),), (("q4", "none"),))


def plan(v: SidePlan, k: SidePlan = FULL, n_layer: int = 3) -> Plan:
    return Plan((LayerPlan(k, v),) * n_layer)


def test_a_plan_of_the_description_passes() -> None:
    check_plan(plan(GOOD), SPEC)
    check_plan(plan(SidePlan("latent", 1, (16, 32), ((16,), (32,)))), SPEC)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (SidePlan("rebuild", 2, (48,), ((48,),)), "a path of full, latent; got rebuild"),
        (SidePlan("latent", 3, (48,), ((48,),)), "a group that divides 2 KV heads; got 3"),
        (SidePlan("latent", 1, (16,), ((16,),)), "expected 2 ranks"),
        (SidePlan("latent", 2, (24,), ((24,),)), "a rank up to 64 in steps of 16; got 24"),
        (SidePlan("latent", 2, (80,), ((80,),)), "a rank up to 64 in steps of 16; got 80"),
        (SidePlan("latent", 2, (0,), ((0,),)), "a rank up to 64 in steps of 16; got 0"),
        (SidePlan("latent", 2, (48,), ((32,),)), r"segments that add up to 48; got \(32,\)"),
        (SidePlan("latent", 2, (48,), ((40, 8),)), "segments in steps of 16"),
        (SidePlan("latent", 2, (48,), ((32, 16),), (("none", "q4"),)), "dropped segments after stored ones"),
        (SidePlan("latent", 2, (48,), ((32, 16),), (("q4",),)), "expected 2 formats of"),
        (SidePlan("latent", 2, (48,), ((48,),), (("q9",),)), "expected 1 formats of"),
    ],
)
def test_what_a_reader_refuses_is_not_written(bad: SidePlan, message: str) -> None:
    with pytest.raises(ConvertError, match=message):
        check_plan(plan(bad), SPEC)


def test_every_layer_is_planned() -> None:
    with pytest.raises(ConvertError, match="expected 3 layers; got 2"):
        check_plan(plan(GOOD, n_layer=2), SPEC)
