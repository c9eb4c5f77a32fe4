"""llama.cpp's `samplers`: which of them take part. Their order is the one that they have here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from latentkv.errors import expected
from latentkv.sampling.options import SamplingOptions

# llama.cpp's letter and name, in the order of the chain, and what turns the sampler off.
_SAMPLERS: dict[str, tuple[str, dict[str, Any]]] = {
    "penalties": ("e", {"repeat_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}),
    "dry": ("d", {"dry_multiplier": 0.0}),
    "top_n_sigma": ("s", {"top_n_sigma": -1.0}),
    "top_k": ("k", {"top_k": 0}),
    "typ_p": ("y", {"typical_p": 1.0}),
    "top_p": ("p", {"top_p": 1.0}),
    "min_p": ("m", {"min_p": 0.0}),
    "xtc": ("x", {"xtc_probability": 0.0}),
    "infill": ("i", {"infill": False}),
    "temperature": ("t", {"temperature": 1.0, "dynatemp_range": 0.0}),
}
DEFAULT = tuple(name for name in _SAMPLERS if name != "infill")


def with_samplers(options: SamplingOptions, samplers: Sequence[str]) -> SamplingOptions:
    """The options with what is not listed turned off. samplers: names, or letters in one string. Raises
    LatentKVError for an unknown name, or another order than the chain's."""
    if isinstance(samplers, str):
        names = {letter: name for name, (letter, _) in _SAMPLERS.items()}
        listed = [names.get(letter, letter) for letter in samplers]
    else:
        listed = list(samplers)
    order = list(_SAMPLERS)
    for name in listed:
        if name not in _SAMPLERS:
            raise expected("samplers", f"some of {', '.join(order)}", repr(name))
    if listed != [name for name in order if name in listed]:
        raise expected("samplers", f"each once, in the order {', '.join(order)}", ", ".join(listed))
    if options.mirostat_mode:  # takes the place of all
        return options
    off: dict[str, Any] = {"infill": True}
    for name in order:
        if name not in listed:
            off |= _SAMPLERS[name][1]
    return replace(options, **off)


def samplers_of(options: SamplingOptions) -> list[str]:
    """Names of the samplers in the chain, as llama.cpp reports them."""
    return [name for name in _SAMPLERS if name != "infill" or options.infill]
