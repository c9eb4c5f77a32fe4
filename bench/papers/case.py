"""What is measured: a cache in a shape, and a figure that a paper claims for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Quantity = Literal["attention", "step", "first", "bytes"]
QUANTITIES: dict[Quantity, str] = {
    "attention": "attention of a step",
    "step": "time between tokens",
    "first": "time to first token",
    "bytes": "bytes of the cache",
}


@dataclass(frozen=True)
class Cache:
    """A file of random weights, and how its cache is opened."""

    sides: str  # as `random_model.py --cache` takes them; "14%": the default file of that share
    kv_k: str = "f16"
    kv_v: str = "f16"

    @property
    def name(self) -> str:
        if self.sides.endswith("%"):
            return f"default file, {self.sides}"
        formats = self.kv_k if self.kv_k == self.kv_v else f"K {self.kv_k}, V {self.kv_v}"
        return f"{self.sides}, {formats}"


FULL = Cache("full/full")
DEFAULT = Cache("14%", "", "")


@dataclass(frozen=True)
class Claim:
    """One figure: how many times less than full rows, at `length` tokens of each of `batch` sequences."""

    what: str
    quantity: Quantity
    cache: Cache
    length: int
    claimed: str  # as the paper says it
    batch: int = 1


@dataclass(frozen=True)
class Paper:
    name: str
    shape: str  # of random_shapes.SHAPES
    claims: tuple[Claim, ...]
    n_layer: int = 0  # 0: all; fewer where the model does not fit, and then steps say nothing
