"""Sampling options, under llama-cpp-python's names, and the native sampler chain they build."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any, Protocol

from latentkv import _core, ranges
from latentkv.errors import expected
from latentkv.sampling.grammar import LlamaGrammar
from latentkv.text import is_texts, utf8

RANDOM_SEED = 0xFFFFFFFF  # llama.h, LLAMA_DEFAULT_SEED: draw a new one
MAX_BREAKERS = 16  # strings of DRY: a new sampler looks for each in every token, up to 50 ms
MAX_BREAKER_BYTES = 40  # as in llama.cpp, which cuts longer ones


@dataclass(frozen=True)
class ServerOptions:
    """Options of llama.cpp's server that llama-cpp-python's calls do not name. Each of Llama's calls takes
    them as further keywords."""

    top_n_sigma: float = -1.0  # keeps logits within so many standard deviations of the largest; <= 0: off
    xtc_probability: float = 0.0  # of removing the likeliest tokens
    xtc_threshold: float = 0.1  # those above it, but for the least of them
    dynatemp_range: float = 0.0  # the temperature moves by so much with the entropy
    dynatemp_exponent: float = 1.0
    dry_multiplier: float = 0.0  # DRY: penalty multiplier * base ** (length - allowed_length) on what repeats
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: Sequence[str] = ("\n", ":", '"', "*")
    min_keep: int = 0  # tokens that typical_p, top_p, min_p and XTC leave at least


@dataclass(frozen=True)
class SamplingOptions(ServerOptions):
    """One request's options. Penalties look at the last `penalty_last_n` tokens, the prompt's among them. All
    but the grammar are native code's too, under the same names (native/src/tokens/sampler.h)."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int = 64
    mirostat_mode: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    infill: bool = False  # llama.cpp's sampler of that name, for gaps that are filled (sampling/order.py)
    seed: int = RANDOM_SEED
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: LlamaGrammar | None = None

    def __post_init__(self) -> None:
        for name in _REALS:
            if not isinstance(getattr(self, name), Real):
                raise expected(name, "a number", repr(getattr(self, name)))
        for name, low, high in (("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0), ("typical_p", 0.0, 1.0)):
            if not low <= getattr(self, name) <= high:
                raise expected(name, f"a probability from {low:g} to {high:g}", getattr(self, name))
        if self.mirostat_mode not in (0, 1, 2):
            raise expected("mirostat_mode", "0, 1 or 2", repr(self.mirostat_mode))
        if not self.repeat_penalty > 0:
            raise expected("repeat_penalty", "a factor above 0 (1 is off)", self.repeat_penalty)
        ranges.SEED.check("seed", self.seed)
        ranges.TOP_K.check("top_k", self.top_k)
        for name in _WINDOWS:
            ranges.PENALTY_WINDOW.check(name, getattr(self, name))
        ranges.Range(0).check("dry_allowed_length", self.dry_allowed_length)
        _check_breakers(self.dry_sequence_breakers)
        ranges.TOKENS.check("min_keep", self.min_keep)
        for token in self.logit_bias:
            ranges.TOKEN_ID.check("logit_bias", token)

    @classmethod
    def of_call(cls, call: str, given: Mapping[str, Any], defaults: Defaults) -> SamplingOptions:
        """From a call of Llama's. given: its arguments by name, of which those that are no sampling options
        are left alone. `server` among them holds ServerOptions and `repeat_last_n`, llama.cpp's name for
        penalty_last_n; in it and in dry_penalty_last_n -1 stands for the context. None stands for what the
        file recommends, else for the default that the call has.

        Raises:
            LatentKVError: a value out of its range.
            TypeError: another name in `server`.
        """
        given = _without_none(call, given, defaults)
        require_tfs_off(given["tfs_z"])
        if not given.get("penalize_nl", True):
            raise expected("penalize_nl", "True", given["penalize_nl"], "use logit_bias")
        server = {name: value for name, value in given["server"].items() if value is not None}
        last_n = server.pop("repeat_last_n", defaults.last_n_tokens_size)
        for name in server:
            if name not in SERVER_OPTIONS:
                raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
        drawn = {"temperature": given.get("temp"), **given}
        asked = {name: drawn[name] for name in NAMES if drawn.get(name) is not None}
        options = {**_CALLS.get(call, {}), **defaults.recommended, **asked, **server}
        options["seed"] = defaults.seed if given["seed"] is None else given["seed"]
        options["logit_bias"] = token_bias(given.get("logit_bias"))
        options["grammar"] = LlamaGrammar.of(given.get("grammar"))
        options["penalty_last_n"] = last_n
        return cls(**options).within(defaults.n_ctx())

    def within(self, n_ctx: int) -> SamplingOptions:
        """The same for a sequence of at most n_ctx tokens: no penalty looks at more, and -1 means all."""
        windows = {name: getattr(self, name) for name in _WINDOWS}
        bound: dict[str, Any] = {name: n_ctx if n == -1 else min(n, n_ctx) for name, n in windows.items()}
        return replace(self, **bound)

    @property
    def n_seen(self) -> int:
        """How many of a prompt's last tokens the penalties look at. They are those of within()."""
        return max(self.penalty_last_n, self.dry_penalty_last_n if self.dry_multiplier > 0 else 0)

    def sampler(self, model: _core.Model) -> _core.Sampler:
        """A fresh chain: same options and seed, same tokens."""
        native = {name: getattr(self, name) for name in NAMES if name != "grammar"}
        native["seed"] = RANDOM_SEED if self.seed == -1 else self.seed
        native["logit_bias"] = dict(self.logit_bias)
        matcher = None if self.grammar is None else self.grammar.matcher(model)
        return _core.Sampler(model, matcher=matcher, **native)


_CALLS = {"create_chat_completion": {"temperature": 0.2}}  # llama-cpp-python's defaults, where they differ
_WINDOWS = ("penalty_last_n", "dry_penalty_last_n")  # tokens that a penalty looks at
NAMES = tuple(each.name for each in fields(SamplingOptions))
SERVER_OPTIONS = tuple(each.name for each in fields(ServerOptions))
_REALS = tuple(each.name for each in fields(SamplingOptions) if each.type == "float")
SERVER_NAMES = {
    "penalty_last_n": "repeat_last_n",
    "mirostat_mode": "mirostat",
}  # where llama.cpp's server differs


class Defaults(Protocol):
    """What a call of Llama's falls back on."""

    last_n_tokens_size: int
    recommended: Mapping[str, Any]

    @property
    def seed(self) -> int: ...
    def n_ctx(self) -> int: ...


def _without_none(call: str, given: Mapping[str, Any], llama: Defaults) -> dict[str, Any]:
    """A call's arguments with its own defaults in place of None, which clients pass for what they leave
    open."""
    absent = [name for name, value in given.items() if value is None]
    if not absent:
        return dict(given)
    own = inspect.signature(getattr(llama, call)).parameters
    return {**given, **{name: own[name].default for name in absent if name in own}}


def _check_breakers(breakers: Sequence[str]) -> None:
    if not is_texts(breakers):
        raise expected("dry_sequence_breakers", "a list of strings", repr(breakers))
    if len(breakers) > MAX_BREAKERS:
        raise expected("dry_sequence_breakers", f"at most {MAX_BREAKERS} strings", len(breakers))
    longest = max((len(utf8(each, "dry_sequence_breakers")) for each in breakers), default=0)
    if longest > MAX_BREAKER_BYTES:
        raise expected("dry_sequence_breakers", f"strings of at most {MAX_BREAKER_BYTES} bytes", longest)


def token_bias(logit_bias: Mapping[int, float] | Mapping[str, float] | None) -> dict[int, float]:
    """The `logit_bias` argument with integer keys: JSON requests carry token ids as strings."""
    try:
        return {int(token): float(bias) for token, bias in (logit_bias or {}).items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise expected("logit_bias", "a map from token id to number", f"{logit_bias!r}") from error


def require_tfs_off(tfs_z: float) -> None:
    """Tail-free sampling left llama.cpp's sampler set; its neutral value is accepted."""
    if tfs_z != 1.0:
        raise expected(
            "tfs_z", "1.0 (tail-free sampling does not exist here)", tfs_z, "use min_p or typical_p"
        )
