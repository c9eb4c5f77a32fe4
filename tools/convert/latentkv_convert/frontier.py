"""Divergence, bytes and time of the ways to group KV heads that a plan was chosen from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

# What predictions differ from measurements by, and no one notices in a step (2 us are 2 % of an 8B step on an
# H100): as fast as another is at most so much slower, whichever is more.
SLACK, SLACK_US = 0.05, 2.0

Us = tuple[float, ...]  # microseconds a layer, one per depth


@dataclass(frozen=True)
class Point:
    """The best plan of one grouping for one budget."""

    budget: float  # for compressed rows, times the conversion's own
    bytes: int  # of the whole cache, and what factors add to the weights
    predicted: float  # nats per token, as formats were chosen by: dropped channels count more
    us: Us | None  # None: of rows or features that were not measured
    exact: str  # row format of exact tokens


@dataclass(frozen=True)
class Line:
    """One grouping over budgets, the conversion's own among them."""

    groups: Mapping[str, int]  # side -> KV heads that share a latent
    points: tuple[Point, ...]

    @property
    def own(self) -> Point:
        return next(point for point in self.points if point.budget == 1)

    @property
    def name(self) -> str:
        """`4`, or `4 (K) and 8 (V)`."""
        k, v = self.groups["k"], self.groups["v"]
        return str(k) if k == v else f"{k} (K) and {v} (V)"


@dataclass(frozen=True)
class Frontier:
    gpu: str
    depths: tuple[int, ...]
    full_bytes: int  # the f16 cache
    full_us: Us | None  # full f16 rows
    lines: tuple[Line, ...]  # that were looked at, from the widest groups
    chosen: int
    context: int  # tokens at which bytes are counted
    prefer: str

    @property
    def line(self) -> Line:
        return self.lines[self.chosen]

    @property
    def sentence(self) -> str:
        """The choice in one line."""
        text, us = f"groups of {self.line.name} KV head{'s' * (self.line.name != '1')}", self.line.own.us
        if us is None or self.full_us is None:
            return text
        full = f"full f16 {self.full_us[0]:.1f}"
        text += f": {us[0]:.1f} us a layer at {self.depths[0]} tokens ({full}), {self.gpu}"
        if self.prefer != "speed" or is_as_fast(us, self.full_us):
            return text
        if len(self.lines) == 1:
            pairs = zip(us, self.full_us, self.depths, strict=True)
            slow = [str(depth) for own, full_row, depth in pairs if not is_as_fast((own,), (full_row,))]
            return f"{text}; slower than full f16 at {' and '.join(slow)}"
        return f"{text}; no group is as fast as full f16 at every depth, this one loses least"

    def as_dict(self) -> dict[str, Any]:
        lines = [
            {
                "group": dict(line.groups),
                "chosen": index == self.chosen,
                "points": [asdict(each) for each in line.points],
            }
            for index, line in enumerate(self.lines)
        ]
        return {
            "gpu": self.gpu,
            "context": self.context,
            "depths": list(self.depths),
            "full_f16": {"bytes": self.full_bytes, "us": self.full_us},
            "lines": lines,
        }

    @property
    def _timed(self) -> bool:
        return self.full_us is not None and any(point.us for line in self.lines for point in line.points)

    @property
    def header(self) -> list[str]:
        """Column heads for the terminal; times only where there are any."""
        depths = [f"us at {self.depths[0]}", *map(str, self.depths[1:])] if self._timed else []
        return ["KV heads a group", "exact tokens", f"MiB at {self.context}", "predicted nats", *depths]

    def cells(self) -> list[list[str]]:
        rows = [["full f16", "", f"{self.full_bytes / 2**20:.1f}", "0", *self._shown(self.full_us)]]
        for index, line in enumerate(self.lines):
            for point in line.points:
                mark = "> " if index == self.chosen and point.budget == 1 else ""
                sizes = [f"{point.bytes / 2**20:.1f}", f"{point.predicted:.2g}"]
                rows.append([f"{mark}{line.name}", point.exact, *sizes, *self._shown(point.us)])
        return rows

    def _shown(self, us: Us | None) -> list[str]:
        if not self._timed:
            return []
        return ["-"] * len(self.depths) if us is None else [f"{each:.1f}" for each in us]


def is_as_fast(us: Us, full: Us) -> bool:
    """At every depth, but for the slack."""
    return all(a <= max((1 + SLACK) * b, b + SLACK_US) for a, b in zip(us, full, strict=True))
