"""Sampling options, under llama-cpp-python's names, and the native sampler chain they build."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from latentkv import _core, ranges
from latentkv.errors import expected
from latentkv.sampling.grammar import LlamaGrammar

RANDOM_SEED = 0xFFFFFFFF  # llama.h, LLAMA_DEFAULT_SEED: draw a new one


@dataclass(frozen=True)
class SamplingOptions:
    """One request's options. Penalties look at the last `penalty_last_n` tokens, the prompt's among them."""

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
    infill: bool = False  # llama.cpp's sampler of that name, for gaps that are filled (sampling/order.py)
    seed: int = RANDOM_SEED
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: LlamaGrammar | None = None

    def __post_init__(self) -> None:
        for name, low, high in (("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0), ("typical_p", 0.0, 1.0)):
            if not low <= getattr(self, name) <= high:
                raise expected(name, f"a probability from {low:g} to {high:g}", getattr(self, name))
        if self.mirostat_mode not in (0, 1, 2):
            raise expected("mirostat_mode", "0, 1 or 2", self.mirostat_mode)
        if not self.repeat_penalty > 0:
            raise expected("repeat_penalty", "a factor above 0 (1 is off)", self.repeat_penalty)
        ranges.SEED.check("seed", self.seed)
        ranges.TOP_K.check("top_k", self.top_k)
        ranges.PENALTY_LAST_N.check("penalty_last_n", self.penalty_last_n)
        ranges.PENALTY_LAST_N.check("dry_penalty_last_n", self.dry_penalty_last_n)
        ranges.TOKENS.check("min_keep", self.min_keep)
        for token in self.logit_bias:
            ranges.TOKEN_ID.check("logit_bias", token)

    def sampler(self, model: _core.Model) -> _core.Sampler:
        """A fresh chain: same options and seed, same tokens."""
        return _core.Sampler(
            model,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            typical_p=self.typical_p,
            repeat_penalty=self.repeat_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            penalty_last_n=self.penalty_last_n,
            mirostat_mode=self.mirostat_mode,
            mirostat_tau=self.mirostat_tau,
            mirostat_eta=self.mirostat_eta,
            top_n_sigma=self.top_n_sigma,
            xtc_probability=self.xtc_probability,
            xtc_threshold=self.xtc_threshold,
            dynatemp_range=self.dynatemp_range,
            dynatemp_exponent=self.dynatemp_exponent,
            dry_multiplier=self.dry_multiplier,
            dry_base=self.dry_base,
            dry_allowed_length=self.dry_allowed_length,
            dry_penalty_last_n=self.dry_penalty_last_n,
            dry_sequence_breakers=list(self.dry_sequence_breakers),
            min_keep=self.min_keep,
            infill=self.infill,
            seed=RANDOM_SEED if self.seed == -1 else self.seed,
            logit_bias=dict(self.logit_bias) or None,
            matcher=None if self.grammar is None else self.grammar.matcher(model),
        )


# Options that llama-cpp-python's calls do not name: llama.cpp's server's names.
SERVER_OPTIONS = (
    "top_n_sigma",
    "xtc_probability",
    "xtc_threshold",
    "dynatemp_range",
    "dynatemp_exponent",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "min_keep",
)


def server_options(call: str, given: Mapping[str, Any], last_n: int, n_ctx: int) -> dict[str, Any]:
    """The keywords of SamplingOptions in `given`, the rest of a call's arguments. `repeat_last_n` stands
    for penalty_last_n (else `last_n`); -1, in it and in dry_penalty_last_n, for the context. Raises
    TypeError for another name."""
    for name in given:
        if name not in SERVER_OPTIONS and name != "repeat_last_n":
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
    options = {name: value for name, value in given.items() if name != "repeat_last_n"}
    options["penalty_last_n"] = given.get("repeat_last_n", last_n)
    for name in ("penalty_last_n", "dry_penalty_last_n"):
        if options.get(name) == -1:
            options[name] = n_ctx
    return options


def token_bias(logit_bias: Mapping[int, float] | Mapping[str, float] | None) -> dict[int, float]:
    """The `logit_bias` argument with integer keys: JSON requests carry token ids as strings."""
    try:
        return {int(token): float(bias) for token, bias in (logit_bias or {}).items()}
    except (TypeError, ValueError) as error:
        raise expected("logit_bias", "a map from token id to number", f"{logit_bias!r}") from error


def require_tfs_off(tfs_z: float) -> None:
    """Tail-free sampling left llama.cpp's sampler set; its neutral value is accepted."""
    if tfs_z != 1.0:
        raise expected(
            "tfs_z", "1.0 (tail-free sampling does not exist here)", tfs_z, "use min_p or typical_p"
        )
