"""What a session is asked for. native/src/runtime/plan/session_options.h has the same options under the same
names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from latentkv import ranges
from latentkv.plan import kv_budget
from latentkv.plan.kv_budget import KvBudget


@dataclass(frozen=True)
class RowFormats:
    """Row formats by name, "" = the file's plan, else f16. `kv` is for K and V, and `plan.presets` says what
    other names become; `kv_k` and `kv_v` override it on one side. `k_plan` and `v_plan` name a format for
    every segment, layers and groups in the file's order; what the file's plan drops stays dropped."""

    kv: str = ""
    kv_k: str = ""
    kv_v: str = ""
    k_plan: Sequence[str] = ()
    v_plan: Sequence[str] = ()
    kv_sink: str = ""  # of the exact tokens
    kv_recent: str = ""


@dataclass(frozen=True)
class Placement:
    """Which tokens are exact, compressed or evicted, and when. -1 and "" = as the file asks."""

    sink: int = -1  # first tokens that stay exact
    recent: int = -1  # latest tokens that stay exact; this or recent_ratio replaces the file's window
    recent_ratio: float = -1.0  # the same as a share of the sequence behind its sinks
    evict: str = ""  # a policy by which each layer evicts tokens
    keep_tokens: str = ""  # tokens that it keeps of a sequence: a number, or "50%" of the context
    prefill: str = ""  # "lazy": a prompt attends to exact K and V; "eager": to its past as it is cached
    kv_rotate: bool = True  # Hadamard for quantized rows of full K and V

    @property
    def evicts(self) -> bool:
        return self.evict not in ("", "none")


@dataclass(frozen=True)
class SessionOptions(Placement, RowFormats):
    """Session and Model.forecast take them as keywords, `**options`: those that differ from their defaults.
    `kv_budget` is not among native code's: plan.master makes a plan of it."""

    n_ctx: int = 0  # tokens of all sequences together; 0 = as trained
    n_ubatch: int = 512
    n_seq_max: int = 1
    n_threads: int = 0  # 0 = every usable core
    n_threads_batch: int = 0  # 0 = n_threads
    implementation: str = "fused"  # or "reference", stock ggml operations
    require_fused: bool = False  # on the device that the model was asked to run on
    kv_budget: KvBudget | None = None

    @classmethod
    def of(cls, given: SessionOptions | Mapping[str, Any]) -> SessionOptions:
        """From keywords, in which a budget may be its text.

        Raises:
            LatentKVError: a budget that is none.
            TypeError: a keyword that is no option.
        """
        if isinstance(given, SessionOptions):
            return given
        return cls(**{**given, "kv_budget": kv_budget.read(given.get("kv_budget"))})

    @classmethod
    def checked(cls, given: Mapping[str, Any]) -> SessionOptions:
        """The same from all of Llama's arguments, whose numbers may be anything.

        Raises:
            LatentKVError: a number out of its range, or a budget that is none.
        """
        options = {name: value for name, value in given.items() if name in NAMES}
        options |= {name: allowed.check(name, options[name]) for name, allowed in _RANGES.items()}
        if options["recent_ratio"] != -1:
            options["recent_ratio"] = ranges.RATIO.check("recent_ratio", options["recent_ratio"])
        return cls.of(options | {"keep_tokens": str(options["keep_tokens"])})

    def keys(self) -> list[str]:
        return [name for name, default in _DEFAULTS.items() if getattr(self, name) != default]

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


NAMES = tuple(field.name for field in fields(SessionOptions))
_DEFAULTS = {field.name: field.default for field in fields(SessionOptions)}
_RANGES = {
    "n_ubatch": ranges.N_UBATCH,
    "n_seq_max": ranges.N_SEQ_MAX,
    "n_threads": ranges.N_THREADS,
    "n_threads_batch": ranges.N_THREADS,
    "sink": ranges.SINK,
    "recent": ranges.RECENT,
}
