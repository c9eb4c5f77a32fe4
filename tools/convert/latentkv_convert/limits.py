"""Ranges of the numbers that a runtime takes from a file, refused before any work rather than when it is
opened. The numbers of latentkv/ranges.py and of native/src/decoder/hparams.cpp and rope.cpp."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from typing import Any

from latentkv import ranges

from .errors import ConvertError

SINK = ranges.SINK.high
RECENT = ranges.RECENT.high
SERVED_CONTEXT = ranges.N_CTX.high
ROPE_BASE = (1.0, 1e15)
ROPE_FACTOR = (1e-3, 1e6)
ATTENTION_FACTOR = (1e-3, 1e3)
YARN_BETA = (1e-3, 1e6)
LOG_MULTIPLIER = (0.0, 1e3)
CLIP = (0.0, 1e6)
SCALE = (1e-6, 1e6)
SOFTCAP = (0.0, 1e6)
EPSILON = (0.0, 1.0)
WINDOW = (0, 1 << 30)
SAMPLING, SAMPLING_PREFIX = ranges.SAMPLING, ranges.SAMPLING_PREFIX

# Field of config.json, under each name that an architecture here reads it by -> lowest and highest value.
_WHOLE = {
    ("num_hidden_layers", "n_layers"): (1, 4096),
    ("hidden_size", "d_model"): (1, 1 << 20),
    ("intermediate_size", "ffn_dim", "ffn_hidden_size", "moe_intermediate_size"): (1, 1 << 22),
    ("num_experts", "num_local_experts"): (2, 4096),
    ("num_experts_per_tok",): (1, 4096),
    ("num_attention_heads", "n_heads", "num_key_value_heads", "num_kv_heads", "head_dim"): (1, 4096),
    ("max_position_embeddings", "max_seq_len", "original_max_position_embeddings"): (1, 1 << 30),
    ("vocab_size",): (1, (1 << 31) - 1),
    ("sliding_window",): (0, (1 << 31) - 1),
}
_EACH_LAYERS = ("moe_intermediate_size", "num_experts")  # which a config may give once a layer
_EPSILONS = ("rms_norm_eps", "layer_norm_epsilon")


def tokens(low: int, high: int = 10**18 - 1, expected: str = "") -> Callable[[str], int]:
    """argparse type: a whole number, such as one of tokens, from `low` to `high`. expected: how an error says
    it."""
    expected = expected or f"a whole number from {low} to {high}"

    def parse(text: str) -> int:
        if not text.isdecimal() or len(text) > 18 or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{expected}; got {text}")
        return int(text)

    return parse


natural = tokens(0, expected="a whole number from 0")
positive = tokens(1, expected="a whole number above 0")


def check_config(config: Mapping[str, Any]) -> None:
    """The sizes and epsilons of a config; a field that is absent or null has its default elsewhere.

    Raises:
        ConvertError: one that no runtime would take, by the field's name.
    """
    experts = ("num_local_experts", "num_experts_per_tok")
    without = experts if not any(config.get(name) for name in experts) else ()
    for names, (low, high) in _WHOLE.items():
        for name in names:
            value = config.get(name)
            if value is None or name in without:
                continue
            each = value if name in _EACH_LAYERS and isinstance(value, list) else [value]
            if not all(_is_whole(one) and low <= one <= high for one in each):
                raise ConvertError("config.json", f"{name} from {low} to {high}", _shown(value))
    for name in _EPSILONS:
        value = config.get(name)
        if value is not None and not (_is_number(value) and 0 <= value <= 1):
            raise ConvertError("config.json", f"{name} from 0 to 1", _shown(value))


def number(where: str, name: str, value: Any, low: float, high: float) -> float:
    """A number from `low` to `high`.

    Raises:
        ConvertError: any other.
    """
    if not _is_number(value) or not low <= value <= high:
        raise ConvertError(where, f"{name} from {low:g} to {high:g}", _shown(value))
    return float(value)


def recommended(where: str, name: str, value: Any) -> float | int:
    """The value of a key of SAMPLING.

    Raises:
        ConvertError: none that its option takes.
    """
    try:
        return ranges.recommended(where, name, value)
    except ValueError:
        raise ConvertError(where, str(SAMPLING[name][1]), _shown(value)) from None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def _is_whole(value: Any) -> bool:
    return _is_number(value) and value == value // 1


def _shown(value: Any) -> str:
    return str(value)[:60]
