"""No compression: every layer keeps full K and V, and the file is a plain GGUF."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...ir import FULL, Basis, LayerPlan, ModelSpec, Plan
from ...work import Work

SUMMARY = "full K and V: a plain GGUF"
UNEQUAL_HEADS = True  # layers may have KV heads of their own


def add_arguments(parser: Any) -> None:
    """No options of its own."""


def create(options: Mapping[str, Any], spec: ModelSpec) -> Uncompressed:
    return Uncompressed(spec.n_layer)


@dataclass(frozen=True)
class Uncompressed:
    n_layer: int
    needs: tuple[str, ...] = ()

    def decompose(self, work: Work, layer: int, side: str, group: int) -> tuple[Basis, ...]:
        return ()

    def plan(self, work: Work) -> Plan:
        return Plan((LayerPlan(FULL, FULL),) * self.n_layer)
