"""What generation_config.json says: which tokens end an answer, and how the makers of a checkpoint sample."""

from __future__ import annotations

from typing import Any

from ... import limits
from . import special
from .files import TokenizerFiles

_FILE = "generation_config.json"
# Names of options, where transformers' is another than llama.cpp's
_NAMES = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
_ALL = -1  # transformers' penalty looks at all tokens

# libllama's keys of tokens that end an answer beside EOS, and ours of those that are left
_FURTHER_ENDS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_OTHER_ENDS = "tokenizer.ggml.eog_token_ids"


def ends(files: TokenizerFiles, n_vocab: int) -> list[int]:
    """The tokens that end an answer: the tokenizer's EOS, then those of generation_config.json, or of
    config.json where it lists none."""
    found = [special.token_id(files, "eos")]
    for source in (files.generation, files.config):
        listed = source.get("eos_token_id")
        if tokens := [token for token in _listed(listed) if token >= 0]:
            found += tokens
            break
    return list(dict.fromkeys(token for token in found if token is not None and 0 <= token < n_vocab))


def _listed(tokens: Any) -> list[int]:
    tokens = tokens if isinstance(tokens, list) else [tokens]
    return [token for token in tokens if isinstance(token, int) and not isinstance(token, bool)]


def _end_keys(files: TokenizerFiles, n_vocab: int) -> dict[str, Any]:
    """Keys of the ends beside EOS. Readers know a few by their texts, the others by these keys alone."""
    eos = special.token_id(files, "eos")
    further = [token for token in ends(files, n_vocab) if token != eos]
    result: dict[str, Any] = dict(zip(_FURTHER_ENDS, further, strict=False))
    others = further[len(_FURTHER_ENDS) :]
    return result | ({_OTHER_ENDS: others} if others else {})


def keys(files: TokenizerFiles, n_vocab: int) -> dict[str, Any]:
    """Of both.

    Raises:
        ConvertError: a sampling option that no reader takes.
    """
    return _end_keys(files, n_vocab) | _sampling(files.generation)


def _sampling(given: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in limits.SAMPLING:
        field = _NAMES.get(name, name)
        if given.get(field) is not None:
            found[name] = limits.recommended(f"{_FILE}: {field}", name, given[field])
    if given.get("do_sample") is False:
        found["temp"] = 0.0  # the likeliest token, whatever its temperature
    if found.get("penalty_repeat", 1.0) != 1.0:
        found.setdefault("penalty_last_n", _ALL)
    return {limits.SAMPLING_PREFIX + name: value for name, value in found.items()}
