"""GET /props: the plan as it is in use."""

from __future__ import annotations

from typing import Any

import pytest

from latentkv.server.about import plan_in_use

OWN = {"segments": [[32, 16], [16]], "formats": [["q4", "q2"], ["none"]]}
PLAIN = {"segments": [[64], [64]], "formats": None}


@pytest.mark.parametrize(
    ("keywords", "k", "v"),
    [
        ({}, [["q4", "q2"], ["none"]], [["f16"], ["f16"]]),
        ({"kv": "q8"}, [["q8", "q8"], ["none"]], [["q8"], ["q8"]]),
        ({"kv": "", "kv_k": "q5", "kv_v": "q1"}, [["q5", "q5"], ["none"]], [["q1"], ["q1"]]),
        (
            {"k_plan": ["q8", "q6", "q1"] * 2, "v_plan": ["q5", "q3", "q2", "q1"]},
            [["q8", "q6"], ["q1"]],
            [["q5"], ["q3"]],
        ),
    ],
)
def test_formats_are_those_of_the_session(keywords: dict[str, Any], k: Any, v: Any) -> None:
    first, second = plan_in_use([{"k": OWN, "v": PLAIN}] * 2, keywords)
    assert (first["k"]["formats"], first["v"]["formats"]) == (k, v)
    assert second["k"] == first["k"]
    assert second["v"]["formats"] == ([["q2"], ["q1"]] if "v_plan" in keywords else v)
