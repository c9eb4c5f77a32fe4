"""bench/gpu/on_card.py: weights take the card's bandwidth, attention the longer of computing and reading."""

from __future__ import annotations

import pytest

from gpu.on_card import Memory, tokens_per_s


def test_parts_add_up() -> None:
    memory = Memory(here=4000.0, card=1000.0)
    # 4 GB of weights: 1 ms here, 4 ms on the card, beside 1 ms of all else
    found = tokens_per_s({0: 1 / 2e-3, 1000: 1 / 3e-3, 10_000: 1 / 4e-3}, 4e9, 500_000, memory)
    assert found[0] == pytest.approx(1 / 5e-3)
    assert found[1000] == pytest.approx(1 / 6e-3)  # 0.5 ms of rows, but 1 ms of products
    assert found[10_000] == pytest.approx(1 / 10e-3)  # 5 ms of rows
    assert Memory.of({"alone": {"read_gb_per_s": 4100.0}}, 1000.0) == Memory(4100.0, 930.0)
