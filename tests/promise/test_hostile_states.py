"""States whose bytes were changed: taken or refused in one line, and the session goes on.

LATENTKV_FUZZ_STATES: how many (default 600 of each kind); `make sanitize` runs them under sanitizers.
"""

from __future__ import annotations

import os
import random
import struct
from typing import Any

import numpy as np
import pytest
from runtime import WATERFILL, model, session, tokens

COUNT = int(os.environ.get("LATENTKV_FUZZ_STATES", "600"))
EDGES = (0, 1, 2, 7, 63, 64, 65, 127, 128, 255, 256, 511, 512, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
KINDS = {
    "full rows": (("--method", "none", "--outtype", "f32"), {"kv": "q4"}),
    "a plan with windows": (WATERFILL, {}),
    "under eviction": (("--method", "none", "--outtype", "f32"), {"evict": "h2o", "keep_tokens": "96"}),
}


def mutated(data: bytes, dice: random.Random) -> bytes:
    """One to three changes; most of them where numbers say what follows."""
    found = bytearray(data)
    for _ in range(dice.randint(1, 3)):
        reach = len(found) if dice.random() < 0.3 else min(len(found), 600)
        at = dice.randrange(max(1, reach))
        kind = dice.randrange(6)
        if kind == 0:
            found[at : at + 1] = bytes([dice.randrange(256)])
        elif kind == 1:
            found[at : at + 4] = struct.pack("<I", dice.choice(EDGES))
        elif kind == 2:
            at -= at % 4
            found[at : at + 8] = struct.pack("<Q", dice.choice(EDGES) << dice.choice((0, 0, 32)))
        elif kind == 3:
            del found[at : at + dice.choice((1, 4, 8, 64))]
        elif kind == 4:
            found[at:at] = bytes(dice.choice((1, 4, 8, 64)))
        else:
            other = dice.randrange(max(1, len(found) - 8))
            found[at : at + 8] = found[other : other + 8]
    return bytes(found[: dice.randrange(len(found))] if dice.random() < 0.1 else found)


def refusal(target: Any, data: bytes, one: bool) -> str | None:
    """Why a state, or that of one sequence, is not taken; None: it is."""
    try:
        target.set_seq_state(0, data, "any") if one else target.set_state(data, "any")
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_state_is_taken_or_refused(kind: str, converted: Any) -> None:
    made_by, options = KINDS[kind]
    opened = model(converted(*made_by))
    n_seq = 1 if "evict" in options else 3
    saved = session(opened, n_ctx=256, n_seq_max=n_seq, **options)
    ids = tokens(opened, 150)
    saved.decode(ids, output="none")
    if n_seq > 1:
        saved.decode(ids[:20], seq=[1] * 20, output="none")
        saved.seq_cp(0, 2, -1, 40)
    states = (saved.state_bytes(), saved.seq_state_bytes(0))
    other = session(opened, n_ctx=256, n_seq_max=n_seq, **options)
    expected = session(opened, n_ctx=256, n_seq_max=n_seq, **options).decode(ids[:4])
    dice = random.Random(1)
    taken = refused = 0
    for _ in range(COUNT):
        one = dice.random() < 0.5
        data = mutated(states[one], dice)
        said = refusal(other, data, one)
        if said is None:
            taken += 1
            continue
        refused += 1
        assert " expected " in said
        assert "\n" not in said
        if refused % 50 == 1:
            other.clear()
            assert np.array_equal(other.decode(ids[:4]), expected)
    assert taken > COUNT // 50  # rows may hold anything
    assert refused > COUNT // 4
