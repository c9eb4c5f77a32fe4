"""`generation_settings`: how an answer was sampled, in llama.cpp's names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from latentkv.sampling.options import SamplingOptions
from latentkv.sampling.order import samplers_of

_LOWEST = -3.4028234663852886e38  # the lowest f32, in place of -inf, which JSON lacks


def number(x: float) -> float:
    """The number in a form that JSON allows."""
    return x if math.isfinite(x) else _LOWEST


def settings_of(
    options: SamplingOptions,
    n_ctx: int,
    n_predict: int = -1,
    stop: Sequence[str] = (),
    **more: Any,
) -> dict[str, Any]:
    """more: values that replace what a body leaves out. n_ctx: the most tokens of a sequence."""
    grammar = options.grammar
    return {
        "n_ctx": n_ctx,
        "seed": options.seed,
        "temperature": options.temperature,
        "dynatemp_range": options.dynatemp_range,
        "dynatemp_exponent": options.dynatemp_exponent,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "top_n_sigma": options.top_n_sigma,
        "xtc_probability": options.xtc_probability,
        "xtc_threshold": options.xtc_threshold,
        "typical_p": options.typical_p,
        "repeat_last_n": options.penalty_last_n,
        "repeat_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "dry_multiplier": options.dry_multiplier,
        "dry_base": options.dry_base,
        "dry_allowed_length": options.dry_allowed_length,
        "dry_penalty_last_n": options.dry_penalty_last_n,
        "dry_sequence_breakers": list(options.dry_sequence_breakers),
        "mirostat": options.mirostat_mode,
        "mirostat_tau": options.mirostat_tau,
        "mirostat_eta": options.mirostat_eta,
        "stop": list(stop),
        "max_tokens": n_predict,
        "n_predict": n_predict,
        "n_keep": 0,
        "n_discard": 0,
        "ignore_eos": False,
        "stream": False,
        "logit_bias": [{"token": token, "bias": number(bias)} for token, bias in options.logit_bias.items()],
        "n_probs": 0,
        "min_keep": options.min_keep,
        "grammar": "" if grammar is None else grammar.text,
        "grammar_lazy": grammar is not None and grammar.lazy,
        "grammar_triggers": [] if grammar is None else list(grammar.triggers),
        "samplers": samplers_of(options),
        "timings_per_token": False,
        "post_sampling_probs": False,
        "backend_sampling": False,
        "lora": [],
    } | more
