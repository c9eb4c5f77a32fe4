"""Thousands of random operations on sequences, and none of them shows in another one.

`make soak` runs for LATENTKV_SOAK_SECONDS with seeds from LATENTKV_SOAK_SEED on; a failure names its seed.
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
from runtime import WATERFILL, model
from soak import Setting, Soak

SECONDS = float(os.environ.get("LATENTKV_SOAK_SECONDS", "24"))
SEED = int(os.environ.get("LATENTKV_SOAK_SEED", "0"))
PALU = ("--method", "palu", "--keep", "0.5", "--group", "2", "--outtype", "f32")
# Rows of 8 bits and fewer: a sum that lies between two codes may fall on either side.
CASES = {
    "rebuilt keys, f32": (PALU, Setting({"kv": "f32"}, 1e-5, shifts=True)),
    "full rows, q8_0": (("--method", "none", "--outtype", "f32"), Setting({"kv": "q8_0"}, 0.01)),
    "a plan with windows": (WATERFILL, Setting({}, 0.02, shares=False, cuts=False)),
}


@pytest.mark.timeout(60 + 2 * SECONDS)
@pytest.mark.parametrize("case", CASES)
def test_sequences_stay_what_they_are(case: str, converted: Any) -> None:
    options, setting = CASES[case]
    opened = model(converted(*options))
    end = time.monotonic() + SECONDS / len(CASES)
    seed, n = SEED, 0
    while seed == SEED or time.monotonic() < end:
        soak = Soak(opened, setting, seed)
        for i in range(400):
            try:
                soak.step()
                if i % 10 == 9:
                    soak.check()
            except BaseException as error:
                raise AssertionError(f"seed {seed}, operation {i} of {dict(soak.done)}") from error
        seed, n = seed + 1, n + 400
    print(f"{case}: {n} operations, seeds {SEED} to {seed - 1}")
