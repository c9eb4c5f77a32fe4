"""What bench/ladder.py measures: caches by rungs of bytes, and the files they need."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ladder.cell import SERVED
from ladder.libllama import CACHES

BUDGETS = ("28%", "17.5%", "14%", "11%", "8.5%")
WINDOW = {"sink": 4, "recent": 128}  # exact tokens, as `--kv-budget` keeps them
EXACT_SLOTS = 304  # what the runtime allocates for WINDOW
BLOCKS = {"balanced": "c4/q6", "small": "c4/q4", "smaller": "c3/q3", "smallest": "c2/q3"}  # presets
CELL_BYTES = 12  # of a slot, beside its rows
RANK_STEP = 16  # ranks are multiples of it
PREFERENCES = ("speed", "size")
# Budget, tokens that a layer keeps, policies: the fewer, the longer the rows that a plan buys. SnapKV gives
# up nothing that was generated: only with many tokens.
EVICTIONS = (
    ("14%", "75%", ("h2o", "keyformer", "snapkv")),
    ("14%", "50%", ("h2o", "keyformer")),
    ("8.5%", "60%", ("h2o",)),
)


@dataclass(frozen=True)
class File:
    """A GGUF to make: options of `latentkv convert`; "oscar" is bench/lab/oscar.py, "" the model."""

    name: str
    words: tuple[str, ...] = ()


PLAIN = File("plain", ("--method", "none"))
OSCAR = File("oscar", ("oscar",))


@dataclass(frozen=True)
class Rung:
    family: str
    setting: str
    file: File
    options: dict[str, Any] = field(default_factory=dict)  # Session's keywords, and kv_budget
    budget: float | None = None  # share of f16 that it must not exceed
    keep: float = 0  # share of dimensions, where `--keep` of the file may be lowered to fit; 0: it may not

    @property
    def name(self) -> str:
        return f"{self.family} {self.setting}"

    def kept(self, keep: float) -> Rung:
        """The same with another share of dimensions."""
        old, new = f"--keep {self.keep:g}", f"--keep {keep:g}"
        words = tuple(shlex.split(shlex.join(self.file.words).replace(old, new)))
        file = File(self.file.name.removesuffix(f"{self.keep:g}") + f"{keep:g}", words)
        return replace(self, setting=self.setting.replace(old, new), file=file, keep=keep)


@dataclass(frozen=True)
class Shape:
    """Sizes of a model's full K and V."""

    n_layer: int
    n_kv: int
    head_dim: int
    n_head: int
    held: float = SERVED  # slots of a layer, their mean: fewer where it sees a window

    @property
    def dims(self) -> int:
        return 2 * self.n_layer * self.n_kv * self.head_dim


@dataclass(frozen=True)
class Published:
    """A method with its best options, and the bits of its rows at each of BUDGETS.

    Fewer dimensions cost more than fewer bits down to 3 (`zack`, `lorc`, `eigen`) or 4 (`palu`), by
    docs/results.md.
    """

    name: str
    options: str
    joint: bool  # one latent for all KV heads of a layer
    bits: tuple[int, ...]
    spared: tuple[float, ...] = (0.005,) * len(BUDGETS)  # of each budget, for what the estimate leaves out

    def rungs(self, shape: Shape) -> Iterator[Rung]:
        for budget, bits, spared in zip(BUDGETS, self.bits, self.spared, strict=True):
            keep = self.keep(shape, (1 - spared) * share(budget), bits)
            if keep > (0 if self.joint else RANK_STEP / shape.head_dim):
                words = ("--method", self.name, *shlex.split(self.options), "--keep", f"{keep:g}")
                file = File(f"{self.name}-{keep:g}", words)
                setting = f"{self.options} --keep {keep:g}, q{bits} + window".strip()
                yield Rung(self.name, setting, file, {"kv": f"q{bits}", **WINDOW}, share(budget), keep)

    def keep(self, shape: Shape, budget: float, bits: int) -> float:
        """The largest in hundredths that fits: rows of all slots, exact ones in f16, cells."""
        latents = 2 * shape.n_layer * (1 if self.joint else shape.n_kv)
        cells = SERVED * CELL_BYTES
        total = budget * (shape.held * 2 * shape.dims + cells)
        fixed = cells + shape.held * 5 * latents + EXACT_SLOTS * CELL_BYTES  # 4 for scale and minimum
        a_dimension = shape.dims * (shape.held * bits / 8 + EXACT_SLOTS * 2)
        return min(1.0, int(100 * (total - fixed) / a_dimension) / 100)


PUBLISHED = (
    Published("palu", "--group all", True, (6, 4, 4, 4, 4)),
    Published("zack", "--group all --basis kq-svd", True, (5, 4, 3, 3, 3)),
    Published("lorc", "", True, (5, 4, 3, 3, 3)),
    # Every head of a layer has the largest rank that any of them needs: more is kept than asked.
    Published("eigen", "", False, (5, 4, 3, 3, 2), (0.005, 0.005, 0.03, 0.06, 0.03)),
)
# K stays whole: two bits of it and a quarter of V are 11.8 % with heads of 64, so nothing is below 14 %.
TALE = (("28%", 4, "q8", 0.1), ("17.5%", 2, "q4", 0.1), ("14%", 2, "q4", 0.05))


def waterfill(prefer: str, budget: str) -> File:
    """As users convert it: the plan of this budget, corrected by the running model."""
    words = ("--method", "waterfill", "--prefer", prefer, "--kv-budget", budget)
    return File(f"{prefer}-{budget.removesuffix('%')}", words)


MASTER = File("master", (*waterfill("size", "14%").words, "--master"))


def evicting() -> Iterator[Rung]:
    """The same bytes for fewer tokens: a master's plan buys longer rows for them."""
    for budget, tokens, policies in EVICTIONS:
        for policy in policies:
            evict = {"kv_budget": budget, "evict": policy, "keep_tokens": tokens}
            setting = f"{budget}, {policy} {tokens}"
            yield Rung("waterfill, size, evicting", setting, MASTER, evict, share(budget))
    options = {"kv": "q4", **WINDOW, "evict": "h2o", "keep_tokens": "43%"}
    yield Rung("full K and V, evicting", "q4 + window, h2o 43%", PLAIN, options, share("14%"))


def tale(shape: Shape) -> Iterator[Rung]:
    """Budget, bits of old tokens, format of recent ones and their share."""
    groups = 1 if shape.n_head > shape.n_kv else min(4, shape.n_kv)
    heads = shape.n_layer * shape.n_kv
    for budget, bits, recent, ratio in TALE:
        row = 2 * shape.dims
        latest = (ratio + EXACT_SLOTS / shape.held) * row * {"q8": 0.54, "q4": 0.29}[recent]
        k = heads * (4 + shape.head_dim * bits / 8)
        cells = CELL_BYTES * SERVED / shape.held
        v = 0.99 * share(budget) * (row + cells) - 1.15 * cells - latest - k
        kept = (v - 5 * heads / groups) / (heads * shape.head_dim * bits / 8)
        keep = int(100 * (0.5 + min(1.0, kept) / 2)) / 100
        if keep >= 0.5 + 8 / (groups * shape.head_dim):
            setting = f"--keep {keep:g} --kv-middle q{bits} --kv-recent {recent} --recent-ratio {ratio:g}"
            words = ("--method", "tale", *setting.split())
            yield Rung("tale", setting, File(f"tale-{bits}-{keep:g}", words), {}, share(budget), keep)


def lower(budget: float, tried: Sequence[tuple[float, float]]) -> float:
    """The share of dimensions to try next, by what took too much: (keep, share of f16) each.

    >>> lower(0.14, [(0.5, 0.16)])
    0.43
    >>> lower(0.14, [(0.5, 0.16), (0.43, 0.15)])
    0.36
    """
    keep, taken = tried[-1]
    dearer, more = next((each for each in tried if each[1] > taken), (0.0, 0.0))
    guess = keep - (taken - budget) * (keep - dearer) / (taken - more)
    return min(int(100 * guess + 1e-6) / 100, round(keep - 0.01, 2))


def share(budget: str) -> float:
    """A budget as a share of f16.

    >>> share("28%")
    0.28
    """
    return float(budget.removesuffix("%")) / 100


def rungs(shape: Shape) -> list[Rung]:
    """Everything, the cheapest first."""
    found = [Rung("full K and V", kv, PLAIN, {"kv": kv}) for kv in ("f16", "q8_0", "q4_0")]
    for k, v in CACHES:
        setting = k if k == v else f"{k} keys, {v} values"
        found.append(Rung("llama.cpp", setting, PLAIN, {"llama_cpp": [k, v]}))
    for preset, kv in BLOCKS.items():
        found.append(Rung("K in blocks of tokens", f"{preset}, {kv}", PLAIN, {"kv": preset}))
    windowed = ("q8_0", "q4_0", "q4", "q3", "q2")
    found += [Rung("full K and V, window", f"{kv} + window", PLAIN, {"kv": kv, **WINDOW}) for kv in windowed]
    wide = {"kv": "q2", "sink": 64, "recent": 256}
    found.append(Rung("full K and V, window", "q2, 64 + 256 exact", PLAIN, wide))
    for prefer in PREFERENCES:
        for budget in BUDGETS:
            file = waterfill(prefer, budget)
            found.append(Rung(f"waterfill, {prefer}", budget, file, {}, share(budget)))
    found += evicting()
    found.append(Rung("OSCAR", "q2, 64 + 256 exact", OSCAR))
    for published in PUBLISHED:
        found += published.rungs(shape)
    return [*found, *tale(shape)]


def files(wanted: Sequence[Rung]) -> list[File]:
    """Each once, in order."""
    return list(dict.fromkeys(rung.file for rung in wanted))


@dataclass(frozen=True)
class Conversions:
    """What all files have in common. 0 or "": as the converter has it."""

    calib: Path
    device: str
    outtype: str = ""
    calib_tokens: int = 0
    fisher_tokens: int = 0

    def command(self, file: File, model: Path, output: Path) -> list[str]:
        """Arguments of Python."""
        words = [str(model), "-o", str(output)]
        words += ["--outtype", self.outtype] if self.outtype else []
        if file != PLAIN:
            words += ["--calib", str(self.calib), "--device", self.device]
            words += ["--calib-tokens", str(self.calib_tokens)] if self.calib_tokens else []
        if file == OSCAR:
            return [str(Path(__file__).parent.with_name("lab") / "oscar.py"), *words]
        if file != PLAIN and self.fisher_tokens:
            words += ["--fisher-tokens", str(self.fisher_tokens)]
        return ["-m", "latentkv", "convert", *words, *file.words, "--no-plot"]
