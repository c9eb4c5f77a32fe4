"""`generation_settings`: how an answer was sampled, in llama.cpp's names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from latentkv.sampling.options import NAMES, SERVER_NAMES, SamplingOptions
from latentkv.sampling.order import samplers_of

_OWN = ("grammar", "logit_bias", "infill")  # in a shape of their own, or among the samplers
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
    drawn = {SERVER_NAMES.get(name, name): getattr(options, name) for name in NAMES if name not in _OWN}
    return (
        drawn
        | {
            "n_ctx": n_ctx,
            "dry_sequence_breakers": list(options.dry_sequence_breakers),
            "stop": list(stop),
            "max_tokens": n_predict,
            "n_predict": n_predict,
            "n_keep": 0,
            "n_discard": 0,
            "ignore_eos": False,
            "stream": False,
            "logit_bias": [
                {"token": token, "bias": number(bias)} for token, bias in options.logit_bias.items()
            ],
            "n_probs": 0,
            "grammar": "" if grammar is None else grammar.text,
            "grammar_lazy": grammar is not None and grammar.lazy,
            "grammar_triggers": [] if grammar is None else list(grammar.triggers),
            "samplers": samplers_of(options),
            "timings_per_token": False,
            "post_sampling_probs": False,
            "backend_sampling": False,
            "lora": [],
        }
        | more
    )
