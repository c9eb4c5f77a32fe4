"""The block description of a GGUF: what its architecture's files mean, or what a file of ours says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from .. import limits
from ..errors import ConvertError
from ..ir import BlockSpec, ModelSpec
from ..schema import ENUMS, KEYS

_WORDS = ("norm", "activation", "ffn", "parallel", "position", "rope_pairing")
_SCALES = ("embedding_scale", "attention_scale", "residual_scale", "logit_scale")


def block(values: Mapping[str, Any], spec: ModelSpec, where: str) -> BlockSpec:
    """spec: the architecture's own. `values`: all keys of the file.

    Raises:
        ConvertError: words of another architecture, or numbers that no runtime takes.
    """
    words = {name: _word(values, spec.block, name, where) for name in _WORDS}
    if KEYS["block_norm"] not in values:
        return replace(spec.block, **words)
    read: dict[str, Callable[[str, Any], Any]] = dict.fromkeys(_SCALES, partial(_number, limits.SCALE))
    read["attention_softcap"] = read["logit_softcap"] = partial(_number, limits.SOFTCAP)
    flags = ("expert_norm", "yarn_truncate", "value_norm", "value_of_key", "output_gate")
    read |= dict.fromkeys(flags, _flag)
    read["gate"] = _gate
    read["mixers"] = partial(_mixers, spec.n_layer)
    read["windows"] = partial(_array, spec.n_layer, partial(_whole, limits.WINDOW))
    read["rope_bases"] = partial(_array, spec.n_layer, _base)
    read["rope_scaled"] = partial(_array, spec.n_layer, _flag)
    found = {name: KEYS[f"block_{name}"] for name in read if KEYS[f"block_{name}"] in values}
    return BlockSpec(**words, **{name: read[name](key, values[key]) for name, key in found.items()})


def _word(values: Mapping[str, Any], own: BlockSpec, name: str, where: str) -> Any:
    """The architecture's own, or the activation that a file of ours may say."""
    key, usual = KEYS[f"block_{name}"], asdict(own)[name]
    word = values.get(key, usual)
    legal = ENUMS["activation"] if name == "activation" else [usual]
    if word not in legal:
        raise ConvertError(where, f"{key} {', '.join(map(str, legal))}", str(word)[:40])
    return word


def _number(bounds: tuple[float, float], key: str, value: Any) -> float:
    return limits.number("gguf", key, value, *bounds)


def _base(key: str, value: Any) -> float:
    return 0.0 if value == 0 else _number(limits.ROPE_BASE, key, value)


def _whole(bounds: tuple[int, int], key: str, value: Any) -> int:
    return int(limits.number("gguf", key, value, *bounds))


def _flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConvertError("gguf", f"{key} true or false", str(value)[:40])
    return value


def _gate(key: str, value: Any) -> str:
    if value not in ENUMS["gate"]:
        raise ConvertError("gguf", f"{key} {', '.join(ENUMS['gate'])}", str(value)[:40])
    return str(value)


def _mixers(n_layer: int, key: str, values: Any) -> tuple[str, ...]:
    """At least one layer attends."""

    def word(key: str, value: Any) -> str:
        if value not in ENUMS["mixer"]:
            raise ConvertError("gguf", f"{key} of {', '.join(ENUMS['mixer'])}", str(value)[:40])
        return str(value)

    found = _array(n_layer, word, key, values)
    if "attention" not in found:
        raise ConvertError("gguf", f"{key} with a layer of attention", "none")
    return found


def _array(n_layer: int, read: Callable[[str, Any], Any], key: str, values: Any) -> tuple[Any, ...]:
    """One value a layer."""
    if not isinstance(values, list) or len(values) != n_layer:
        got = f"{len(values)}" if isinstance(values, list) else str(values)[:40]
        raise ConvertError("gguf", f"{n_layer} values of {key}, one a layer", got)
    return tuple(read(key, value) for value in values)
