"""Rows of the cache for models of random weights: as asked for, or as the planner cuts them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .random_shapes import SHAPES, Heads, Shape

# Rows of a group as the planner cuts them, by share of f16 and units of 128 channels in a group: (format,
# channels) of K and V. All of a share take the same bytes. Other groups are scaled from eight units.
PLAN_UNITS, UNIT = 8, 128
# KV heads that `convert` takes for a group with --prefer speed (an H100's times); 8 units where a shape is
# not here.
CHOSEN_GROUPS = {"8b": 4, "qwen38-27b": 2, "gemma4-31b": 1}
PLANS = {
    ("28", 8): (
        (("q8", 128), ("q8", 256), ("q4", 128), ("q4", 256), ("q2", 128)),
        (("q8", 192), ("q4", 192), ("q4", 256), ("q2", 192), ("q1", 64)),
    ),
    ("14", 8): (
        (("q8", 64), ("q4", 128), ("q4", 128), ("q2", 128), ("q2", 128), ("q2", 64), ("q1", 128)),
        (("q4", 128), ("q4", 128), ("q2", 128), ("q2", 128), ("q1", 128), ("q1", 128)),
    ),
    ("14", 4): (
        (("q8", 32), ("q4", 128), ("q2", 128), ("q1", 64), ("q1", 32)),
        (("q4", 128), ("q2", 128), ("q1", 128)),
    ),
    ("14", 2): (
        (("q4", 64), ("q2", 64), ("q2", 32), ("q1", 32)),
        (("q4", 64), ("q2", 64), ("q1", 64)),
    ),
    ("14", 1): (
        (("q4", 32), ("q2", 64)),
        (("q4", 32), ("q1", 64)),
    ),
    ("8.5", 8): (
        (("q4", 64), ("q4", 128), ("q2", 64), ("q2", 128), ("q1", 128)),
        (("q4", 64), ("q2", 64), ("q2", 128), ("q1", 128), ("q1", 128)),
    ),
}
# The same with four scales in front of a group's row, as `convert` writes them by default.
ROWS = {
    "28": (
        (("n8", 128), ("n6", 192), ("n4", 320), ("n3", 192), ("n2", 192)),
        (("n8", 128), ("n6", 256), ("n4", 320), ("n3", 192), ("n2", 64)),
    ),
    "14": (
        (("n6", 64), ("n4", 192), ("n3", 128), ("n2", 320), ("n1", 320)),
        (("n4", 64), ("n3", 192), ("n2", 384), ("n1", 320)),
    ),
    "8.5": (
        (("n4", 64), ("n3", 128), ("n2", 256), ("n1", 320)),
        (("n3", 64), ("n2", 256), ("n1", 512)),
    ),
}

# These are rows of multi-head latent attention by share of f16; turned channels come first.
MLA_PLANS = {
    "28": (("q8", 64), ("q8", 96), ("q4", 224), ("q2", 96)),
    "14": (("q4", 64), ("q4", 128), ("q2", 128), ("q1", 64)),
}

Segments = tuple[tuple[str, int], ...]  # row format and channels, by importance


@dataclass(frozen=True)
class Side:
    """One side of the cache: its path, the KV heads that share a latent, that latent's rank and rows."""

    path: str
    group: int
    rank: int
    segments: Segments = ()  # none: one format, chosen when the file is opened
    one_row: bool = False  # keys of V's rows, where V is made of the key projection

    @property
    def keeps_projection(self) -> bool:
        """Form E (docs/gguf.md), which planned files have for their exact windows."""
        return self.path in ("full", "rotated") or bool(self.segments)

    @classmethod
    def parse(cls, text: str, shape: Shape) -> Side:
        """`full`, `rotated:64`, `rebuild:256:4` (path, rank, heads in a group)."""
        path, *numbers = text.split(":")
        if path == "full":
            return cls("full", 1, shape.head_dim)
        rank, group = (int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 1)
        return cls(path, group, rank)

    def of(self, heads: Heads | None, shape: Shape) -> Side:
        """This side in a layer: full where none attends, and groups as wide as elsewhere, of one head at
        least."""
        if heads is None:
            return Side("full", 1, 0)
        if self.path == "full":
            return Side("full", 1, heads.head_dim)
        if self.one_row and not heads.has_v:
            return Side("value", 1, 0)
        group = max(1, self.group * shape.head_dim // heads.head_dim)
        wider = group * heads.head_dim // (self.group * shape.head_dim)
        segments = tuple((name, wider * n) for name, n in self.segments)
        return replace(self, group=group, rank=wider * self.rank, segments=segments)


def sides_of(cache: str, shape: Shape) -> tuple[Side, Side]:
    """K and V of `full/full` or `rotated:512:8/latent:512:8`."""
    k, v = cache.split("/")
    return Side.parse(k, shape), Side.parse(v, shape)


def chosen_group(name: str) -> int:
    """KV heads that share a latent in this shape's default files."""
    return CHOSEN_GROUPS.get(name, PLAN_UNITS * UNIT // SHAPES[name].head_dim)


# K path; one-row: beside it one row for K and V where a model has one projection for both
PREFER = {"speed": "rotated", "size": "rebuild", "one-row": "rotated"}

# A scale and a minimum in every segment, or four scales in front of a group's row.
SCALES = ("segment", "group")


def planned(plan: str, prefer: str, shape: Shape, group: int, scales: str = "segment") -> tuple[Side, Side]:
    """K and V of a file that `convert` writes by default, or with --group; prefer: one of PREFER, scales: one
    of SCALES."""
    if shape.mla:
        row = MLA_PLANS[plan]
        return Side("value", 1, 0), Side("latent", 1, sum(n for _, n in row), row)
    k_path = PREFER[prefer]
    units = group * shape.head_dim // UNIT
    known = PLANS.get((plan, units)) if scales == "segment" else None
    widest = PLANS[plan, PLAN_UNITS] if scales == "segment" else ROWS[plan]
    k, v = known or (scaled(segments, units) for segments in widest)
    return (
        Side(k_path, group, sum(n for _, n in k), k, prefer == "one-row"),
        Side("latent", group, sum(n for _, n in v), v),
    )


def scaled(segments: Segments, units: int) -> Segments:
    """Rows of a narrower group at about the same share: every format's channels in proportion, in units of
    32.

    >>> scaled((("q4", 128), ("q4", 256), ("q1", 256)), 2)
    (('q4', 96), ('q1', 64))
    """
    channels: dict[str, int] = {}
    for name, n in segments:
        channels[name] = channels.get(name, 0) + n
    steps = {name: round(n * units / PLAN_UNITS / 32) for name, n in channels.items()}
    return tuple((name, 32 * n) for name, n in steps.items() if n)
