"""The block description of a GGUF: a file of ours states it, any other file has that of its architecture."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from .. import limits
from ..errors import ConvertError
from ..ir import BlockSpec, ModelSpec
from ..schema import BLOCK_KEYS, BLOCK_OPTIONS, BLOCK_WORDS, ENUMS


def block(values: Mapping[str, Any], spec: ModelSpec, where: str) -> BlockSpec:
    """spec: the architecture's own. `values`: all keys of the file.

    Raises:
        ConvertError: words of another architecture, or numbers that no runtime takes.
    """
    words = {name: _word(values, spec.block, name, where) for name in BLOCK_WORDS}
    if BLOCK_KEYS["norm"] not in values:
        return replace(spec.block, **words)
    options = {name: _option(name, default) for name, default in BLOCK_OPTIONS.items()}
    layers = {name: partial(_array, spec.n_layer, read) for name, read in _OF_LAYERS.items()}
    found: dict[str, Any] = {
        name: read(BLOCK_KEYS[name], values[BLOCK_KEYS[name]])
        for name, read in (options | layers).items()
        if BLOCK_KEYS[name] in values
    }
    if "attention" not in found.get("mixers", ["attention"]):
        raise ConvertError("gguf", f"{BLOCK_KEYS['mixers']} with a layer of attention", "none")
    return BlockSpec(**words, **found)


def _word(values: Mapping[str, Any], own: BlockSpec, name: str, where: str) -> Any:
    """The file's word, which is the architecture's own; only the activation may be another."""
    key, usual = BLOCK_KEYS[name], asdict(own)[name]
    word = values.get(key, usual)
    legal = ENUMS["activation"] if name == "activation" else [usual]
    if word not in legal:
        raise ConvertError(where, f"{key} {', '.join(map(str, legal))}", str(word)[:40])
    return word


def _option(name: str, default: Any) -> Callable[[str, Any], Any]:
    """The reader of an option for all layers. Factors must be above 0; a cap of 0 means none."""
    if isinstance(default, bool):
        return _flag
    if isinstance(default, str):
        return partial(_one_of, ENUMS[name])
    if name.endswith("epsilon"):
        return partial(_number, limits.EPSILON)
    return partial(_number, limits.SOFTCAP if name.endswith("softcap") else limits.SCALE)


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


def _one_of(words: Collection[str], key: str, value: Any) -> str:
    if value not in words:
        raise ConvertError("gguf", f"{key} of {', '.join(words)}", str(value)[:40])
    return str(value)


def _array(n_layer: int, read: Callable[[str, Any], Any], key: str, values: Any) -> tuple[Any, ...]:
    """One value for each layer."""
    if not isinstance(values, list) or len(values) != n_layer:
        got = f"{len(values)}" if isinstance(values, list) else str(values)[:40]
        raise ConvertError("gguf", f"{n_layer} values of {key}, one a layer", got)
    return tuple(read(key, value) for value in values)


_OF_LAYERS: dict[str, Callable[[str, Any], Any]] = {
    "windows": partial(_whole, limits.WINDOW),
    "rope_bases": _base,
    "rope_scaled": _flag,
    "mixers": partial(_one_of, ENUMS["mixer"]),
}
