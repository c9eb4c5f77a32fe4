"""What a session is asked for. native/src/runtime/plan/session_options.h has the same options under the same
names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from latentkv import ranges
from latentkv.errors import expected
from latentkv.plan import kv_budget
from latentkv.plan.kv_budget import KvBudget


@dataclass(frozen=True)
class RowFormats:
    """Row formats by name, "" = the file's plan, else f16. `kv` is for K and V, and `plan.presets` says what
    other names become; `kv_k` and `kv_v` override it on one side. What the file's plan drops stays dropped.
    `k_plan` and `v_plan` name a format for every segment, layers and groups in the file's order, in place of
    the file's plan. `kv_sink` and `kv_recent` are those of exact tokens, "" = the file's, else f16, and never
    coarser than `kv`."""

    kv: str = ""
    kv_k: str = ""
    kv_v: str = ""
    k_plan: Sequence[str] = ()
    v_plan: Sequence[str] = ()
    kv_sink: str = ""
    kv_recent: str = ""


@dataclass(frozen=True)
class CachePolicy:
    """Which tokens a cache keeps exact, compresses or evicts, and when. -1 and "" = as the file asks.

    sink, recent: first and latest tokens that are kept exact; recent_ratio: the latest as a share of the
    sequence after its sinks, which grows with it. recent or recent_ratio replaces the file's window.
    fixed_window: the window is that; else older tokens stay exact too while the cache has room for that.
    kv_read: on a GPU, compressed tokens that a layer reads for a decoded token, those that its queries are
    likeliest to look at; at least 512. 0: all.
    evict: a policy ("h2o", "keyformer", "snapkv") by which each layer keeps `keep_tokens` of a sequence, a
    number or a share of its context ("50%"), sinks and recent tokens among them. Sequences then go as a whole
    only, and neither share tokens nor move.
    prefill: "lazy": a prompt whose sequences all start with it attends to exact K and V, layer by layer, and
    its rows are compressed when they are written; "eager": tokens see the compressed past. "lazy" is refused
    where exact K and V are not in the file.
    kv_rotate: a Hadamard rotation of q, k, v where full K or V are quantized row by row, as in llama.cpp.
    """

    sink: int = -1
    recent: int = -1
    recent_ratio: float = -1.0
    fixed_window: bool = False
    kv_read: int = 0
    evict: str = ""
    keep_tokens: str = ""
    prefill: str = ""
    kv_rotate: bool = True

    @property
    def evicts(self) -> bool:
        return self.evict not in ("", "none")


@dataclass(frozen=True)
class SessionOptions(CachePolicy, RowFormats):
    """Session and Model.forecast take them as keywords, `**options`: those that differ from their defaults.
    `kv_budget` is not among native code's: plan.master makes a plan of it."""

    n_ctx: int = 0  # tokens of all sequences together; 0 = as trained
    n_ubatch: int = 0  # 0 = as native/src/cache/ubatches.h chooses
    n_batch: int = 0  # tokens of a call, which no ubatch is longer than; 0 = any number
    n_seq_max: int = 1
    n_guesses: int = (
        0  # that recurrent layers take back without computing anything anew; a state's memory each
    )
    mtp: bool = False  # layers that guess further tokens are used:
    mtp_path: str = ""  # those of this GGUF; "" = of the model's
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
        cased = {name: str(given[name]).lower() for name in _FORMATS if name in given}
        return cls(**{**given, **cased, "kv_budget": kv_budget.read(given.get("kv_budget"))})

    @classmethod
    def checked(cls, given: Mapping[str, Any]) -> SessionOptions:
        """The same from all of Llama's arguments, which may be anything. None stands for a default.

        Raises:
            LatentKVError: a number out of its range, a name that is no text, or a budget that is none.
        """
        options = {name: value for name, value in given.items() if name in NAMES and value is not None}
        options["keep_tokens"] = str(options.get("keep_tokens", ""))
        for name in _TEXTS:
            if not isinstance(options.get(name, ""), str):
                raise expected(name, "a name", repr(options[name]))
        options = {**_DEFAULTS, **options}
        options |= {name: allowed.check(name, options[name]) for name, allowed in _RANGES.items()}
        if options["recent_ratio"] != -1:
            options["recent_ratio"] = ranges.RATIO.check("recent_ratio", options["recent_ratio"])
        return cls.of(options)

    def of_one_sequence(self) -> SessionOptions:
        """By which a budget is counted: any context, and ubatches of the default length."""
        return replace(self, n_ctx=0, n_ubatch=0, n_batch=0, n_seq_max=1)

    def reference(self, kv: str) -> SessionOptions:
        """The same sizes and threads with another cache: which tokens it keeps exact or evicts is its own
        affair."""
        others: dict[str, Any] = {
            each.name: each.default for of in (RowFormats, CachePolicy) for each in fields(of)
        }
        return replace(self, **{**others, "kv": kv, "kv_budget": None})

    def keys(self) -> list[str]:
        return [name for name, default in _DEFAULTS.items() if getattr(self, name) != default]

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


NAMES = tuple(field.name for field in fields(SessionOptions))
_DEFAULTS = {field.name: field.default for field in fields(SessionOptions)}
_TEXTS = tuple(name for name, default in _DEFAULTS.items() if isinstance(default, str))
_FORMATS = ("kv", "kv_k", "kv_v", "kv_sink", "kv_recent")
_RANGES = {
    "n_ubatch": ranges.N_UBATCH,
    "n_seq_max": ranges.N_SEQ_MAX,
    "n_threads": ranges.N_THREADS,
    "n_threads_batch": ranges.N_THREADS,
    "sink": ranges.SINK,
    "recent": ranges.RECENT,
    "kv_read": ranges.KV_READ,
}
