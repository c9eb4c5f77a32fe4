"""Which numbers an option takes. Native code has the same limits, but no words for what int32 cannot hold."""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import SupportsFloat, SupportsIndex

from latentkv.errors import expected

INT32_MAX = 2**31 - 1


def integer(where: str, value: SupportsIndex, wanted: str = "an integer") -> int:
    """The value as an int; LatentKVError for what is none."""
    try:
        return operator.index(value)
    except TypeError:
        raise expected(where, wanted, repr(value)) from None


def token_ids(where: str, tokens: Iterable[SupportsIndex]) -> list[int]:
    """The tokens as a list; LatentKVError for what is no list of integers. The vocabulary is not asked."""
    try:
        return [operator.index(token) for token in tokens]
    except TypeError:
        got = reprlib.repr(tokens)
    raise expected(where, "a list of token ids", got)


@dataclass(frozen=True)
class Range:
    """Integers `low` … `high`, and single values with a meaning of their own."""

    low: int
    high: int = INT32_MAX
    special: Mapping[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        said = "".join(f", or {value} ({meaning})" for value, meaning in self.special.items())
        return f"{self.low} … {self.high}{said}"

    def read(self, text: str) -> int:
        """Raises ValueError for what is no integer within."""
        return self.check("", int(text))

    def check(self, where: str, value: SupportsIndex) -> int:
        """The value as an int. Raises LatentKVError for one outside, and for what is no integer."""
        number = integer(where, value, f"an integer, {self}")
        if not self.low <= number <= self.high and number not in self.special:
            raise expected(where, str(self), number)
        return number

    def plain(self) -> Range:
        """Without the values that have a meaning of their own."""
        return Range(self.low, self.high)


@dataclass(frozen=True)
class RealRange:
    """Finite numbers from `low` to `high`."""

    low: float
    high: float = math.inf

    def __str__(self) -> str:
        if math.isinf(self.high):
            return "a finite number" + (f" of at least {self.low:g}" if math.isfinite(self.low) else "")
        return f"a number from {self.low:g} to {self.high:g}"

    def read(self, text: str) -> float:
        """Raises ValueError for what is no number within."""
        return self.check("", float(text))

    def check(self, where: str, value: SupportsFloat) -> float:
        """The value as a float. Raises LatentKVError for one outside, and for what is no number."""
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise expected(where, str(self), repr(value)) from None
        if not (self.low <= number <= self.high and math.isfinite(number)):
            raise expected(where, str(self), value)
        return number


def check_auto(where: str, allowed: Range, value: SupportsIndex | str) -> int | str:
    """As `allowed` checks it; or `auto`."""
    return value if value == "auto" else allowed.check(where, value)  # type: ignore[arg-type, return-value]


N_CTX = Range(1, 1 << 28, {0: "as trained"})
N_BATCH = Range(1)
N_UBATCH = Range(1, 1 << 16, {0: "the default"})
N_SEQ_MAX = Range(1, 64)
N_THREADS = Range(1, 512, {0: "the default"})
N_GPU_LAYERS = Range(0, special={-1: "all"})
MAIN_GPU = Range(0)
SHARE = RealRange(0.0)
SINK = Range(0, 1 << 16, {-1: "the file's"})
RECENT = Range(0, 1 << 20, {-1: "the file's"})
KV_READ = Range(512, 1 << 20, {0: "all"})
RATIO = RealRange(0.0, 1.0)
ANY_NUMBER = RealRange(-math.inf)
SEED = Range(0, 2**32 - 1, {-1: "a new one"})
TOP_K = Range(1, special={0: "off", -1: "off"})
PENALTY_WINDOW = Range(0, 1 << 24, {-1: "the context"})
TOKENS = Range(0, 1 << 28)
TOKEN_ID = Range(0)
POSITIVE = Range(1)

# What a file recommends, by llama.cpp's names of its keys -> the option and its range.
SAMPLING_PREFIX = "general.sampling."
SAMPLING: Mapping[str, tuple[str, Range | RealRange]] = {
    "temp": ("temperature", RealRange(0.0)),
    "top_k": ("top_k", TOP_K),
    "top_p": ("top_p", RATIO),
    "min_p": ("min_p", RATIO),
    "xtc_probability": ("xtc_probability", RATIO),
    "xtc_threshold": ("xtc_threshold", RATIO),
    "penalty_last_n": ("penalty_last_n", PENALTY_WINDOW),
    "penalty_repeat": ("repeat_penalty", RealRange(1e-3)),
    "mirostat": ("mirostat_mode", Range(0, 2)),
    "mirostat_tau": ("mirostat_tau", RealRange(0.0)),
    "mirostat_eta": ("mirostat_eta", RealRange(0.0)),
}


def recommended(where: str, name: str, value: object) -> float | int:
    """The value of such a key: f32 as it was meant (0.95, not 0.949999988), whole numbers of either type.
    Raises LatentKVError for one that its option does not take."""
    _, allowed = SAMPLING[name]
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise expected(where, str(allowed), type(value).__name__)
    if isinstance(allowed, RealRange):
        return allowed.check(where, float(f"{value:.7g}"))
    return allowed.check(where, int(value) if value == value // 1 else value)  # type: ignore[arg-type]
