"""Architectures: one module per transformers `model_type`; the directory is the registry, with its packages,
which hold what their modules share.

A module `source/archs/<model_type>.py` provides

    def model_spec(config) -> ModelSpec
    def config_of(stock) -> dict     config.json of a GGUF whose general.architecture is this; a module whose
                                     files are another's (mistral: llama) has none
    ARCHITECTURE: str                that general.architecture, where it is not the model_type
    STOCK_KEYS: tuple                keys of such a file that config_of reads, of those that change what its
                                     tensors mean (source/stock.py)
    TEXT_PREFIX: str                 what `model` is called in a checkpoint that also sees pictures, whose
                                     config has a text_config; its model_type is the module's, and that of the
                                     text part ends in _text
    OTHER_TYPES: tuple               further model_types of its checkpoints

`config` is config.json as it is on disk; a field it may lack has transformers' default. Anything the one
native block cannot do raises ConvertError here.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import limits
from ...errors import ConvertError, warn
from ...ir import F32, ModelSpec, TensorRole
from ..stock import Stock

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}

# Norms of a layer's queries and keys.
QK_NORMS = tuple(
    TensorRole(f"self_attn.{side}_norm.weight", f"attn_{side}_norm.weight", "vector") for side in "qk"
)


@cache
def _places() -> Mapping[str, str]:
    """Module -> its name in Python."""
    walked = pkgutil.walk_packages(__path__, f"{__name__}.")
    return {found.name.rpartition(".")[2]: found.name for found in walked if not found.ispkg}


def names() -> list[str]:
    return sorted(_places())


def _module(name: str) -> ModuleType:
    return importlib.import_module(_places()[name])


def name_of(model_type: str) -> str:
    """The module's, of a config's model_type.

    Raises:
        ConvertError: no such module.
    """
    short = model_type.removesuffix("_text")
    for name in (model_type, short):
        if name in _places():
            return name
    for name in names():
        if short in getattr(_module(name), "OTHER_TYPES", ()):
            return name
    raise ConvertError("architecture", f"a model_type of {', '.join(names())}", model_type)


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a checkpoint that sees pictures the fields of its text model, where that has a module here."""
    text = config.get("text_config")
    name = name_of(str(config["model_type"]))
    if not isinstance(text, Mapping) or not hasattr(_module(name), "TEXT_PREFIX"):
        return config
    tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    return {**config, **text, **tied, "model_type": name, "declared_type": str(config["model_type"])}


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    """The decoder that `config` describes.

    Raises:
        ConvertError: an unknown model_type, a missing field, or a feature outside the block description.
    """
    model_type = str(config["model_type"])
    module, text = _module(name_of(model_type)), text_part(config)
    limits.check_config(text)
    require(text, "is_causal", None, None, True)
    require(text, "use_bidirectional_attention", None, None, False, "vision")  # of pictures alone
    try:
        spec: ModelSpec = module.model_spec(text)
    except KeyError as error:
        raise ConvertError("config.json", f"the field {error.args[0]}", "none") from None
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        raise ConvertError(
            "config.json", f"fields as transformers writes them for {model_type}", str(error)
        ) from None
    sizes = {"context_length": spec.n_ctx, "embedding_length": spec.n_embd, "block_count": spec.n_layer}
    spec = replace(spec, keys={**sizes, "attention.head_count": spec.n_head, **spec.keys})
    if text is not config:
        spec = _renamed(spec, module.TEXT_PREFIX)
    if spec.n_kv < 1 or spec.n_head % spec.n_kv:
        raise ConvertError(
            "config.json", "query heads divisible by KV heads", f"{spec.n_head} and {spec.n_kv}"
        )
    if spec.head_dim < 1 or ("attention.key_length" not in spec.keys and spec.q_width != spec.n_embd):
        raise ConvertError(
            "config.json", f"a width divisible by its {spec.n_head} query heads", str(spec.n_embd)
        )
    if spec.block.position == "rope" and (spec.n_rot % 2 or not 2 <= spec.n_rot <= spec.head_dim):
        raise ConvertError(
            "config.json", f"RoPE over an even number of a head's {spec.head_dim} dimensions", str(spec.n_rot)
        )
    return spec


def _renamed(spec: ModelSpec, prefix: str) -> ModelSpec:
    """With another name for `model`."""

    def renamed(name: str) -> str:
        return f"{prefix}{name.removeprefix('model')}" if name.startswith("model.") else name

    tables = tuple(replace(role, source=renamed(role.source)) for role in spec.global_tensors)
    return replace(spec, layers=renamed(spec.layers), global_tensors=tables)


def config_of(architecture: str, stock: Stock) -> dict[str, Any]:
    """config.json that a GGUF of this general.architecture stands for.

    Raises:
        ConvertError: an architecture that has no module here, or a key that its module cannot follow.
    """
    modules = {name: _module(name) for name in names()}
    known = {
        getattr(module, "ARCHITECTURE", name): (name, module)
        for name, module in modules.items()
        if hasattr(module, "config_of")
    }
    if architecture not in known:
        raise ConvertError(stock.where, f"a general.architecture of {', '.join(known)}", architecture)
    model_type, module = known[architecture]
    stock.check(getattr(module, "STOCK_KEYS", ()))
    config: dict[str, Any] = module.config_of(stock)
    return {"model_type": model_type, **config}


def require(config: Mapping[str, Any], name: str, default: Any, *allowed: Any) -> None:
    """Refuses a field (absent: `default`) whose value is none of `allowed`."""
    value = config.get(name, default)
    if value not in allowed:
        raise ConvertError("config.json", f"{name} {' or '.join(map(str, allowed))}", str(value))


LOCAL, FULL = "sliding_attention", "full_attention"  # kinds of layers, by whether they have a window


def local_layers(config: Mapping[str, Any], usual: Sequence[bool]) -> list[bool]:
    """Which layers have a window. usual: those of the architecture."""
    kinds = config.get("layer_types") or layer_types(usual)
    for kind in kinds:
        require({"layer_types": kind}, "layer_types", None, LOCAL, FULL)
    return [kind == LOCAL for kind in kinds]


def layer_types(is_local: Iterable[bool]) -> list[str]:
    return [LOCAL if local else FULL for local in is_local]


def ropes_by_kind(
    config: Mapping[str, Any], full: Mapping[str, Any], local: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """RoPE by kind of layer: rope_parameters of transformers 5 over these, the fields of earlier configs."""
    given: Mapping[str, Any] = config.get("rope_parameters") or {}
    if unknown := sorted(set(given) - {FULL, LOCAL}):
        raise ConvertError("config.json", f"rope_parameters of {FULL} and {LOCAL}", ", ".join(unknown))
    ropes = {
        kind: {**parameters, **(given.get(kind) or {})} for kind, parameters in ((FULL, full), (LOCAL, local))
    }
    require(ropes[LOCAL], "rope_type", "default", "default")
    return ropes


def bases_by_kind(ropes: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """RoPE's base by kind of layer."""
    return {
        kind: limits.number("rope", "rope_theta", of["rope_theta"], *limits.ROPE_BASE)
        for kind, of in ropes.items()
    }


def from_zero(weight: F32) -> F32:
    """A norm's weight, which some checkpoints keep less 1."""
    return weight + np.float32(1)


def every_second(config: Mapping[str, Any], n_layer: int, gguf_arch: str) -> list[bool]:
    """Which layers have a window, where it is the even ones for stock readers."""
    usual = [layer % 2 == 0 for layer in range(n_layer)]
    is_local = local_layers(config, usual)
    if is_local != usual:
        warn_of_readers(f"a window in every second layer, for stock readers of the {gguf_arch} architecture")
    return is_local


def warn_of_readers(expected: str, got: str = "others") -> None:
    """Of layers that a stock reader takes for others."""
    warn("config.json", expected, got, "this runtime follows them; a reader that does not will differ")


def window_keys(window: int | None) -> dict[str, Any]:
    """The stock key of a sliding window that every layer has, in tokens; none for no window."""
    return {"attention.sliding_window": int(window)} if window else {}


def expert_keys(n_expert: int, n_used: int, n_ff: int) -> dict[str, Any]:
    """Stock keys of an FFN with experts, n_ff wide each."""
    if n_used > n_expert:
        raise ConvertError("config.json", f"num_experts_per_tok up to {n_expert}, all experts", str(n_used))
    return {
        "expert_count": n_expert,
        "expert_used_count": n_used,
        "expert_feed_forward_length": n_ff,
    }


def tables(
    config: Mapping[str, Any],
    embeddings: str,
    norm: str,
    parts: Iterable[str] = ("weight",),
    tied: bool = True,
) -> list[TensorRole]:
    """Token table, last norm and, unless it is the token table, the output. parts: of the norm; tied: what
    tie_word_embeddings is where the config does not say."""
    roles = [TensorRole(f"{embeddings}.weight", "token_embd.weight", "table")]
    roles += [TensorRole(f"{norm}.{part}", f"output_norm.{part}", "vector") for part in parts]
    if not config.get("tie_word_embeddings", tied):
        roles.append(TensorRole("lm_head.weight", "output.weight", "table"))
    return roles


def packed_rows(n_head: int, n_kv: int, head_dim: int, interleaved: bool) -> dict[str, NDArray[np.int64]]:
    """Rows of Q, K and V in one packed projection: all of Q, of K, of V; or, `interleaved`, for each KV head
    its query heads, its K, its V."""
    shared = n_head // n_kv
    rows = np.arange((n_head + 2 * n_kv) * head_dim)
    if interleaved:
        groups = rows.reshape(n_kv, shared + 2, head_dim)
        parts = {"q": groups[:, :shared], "k": groups[:, shared], "v": groups[:, shared + 1]}
        return {side: part.reshape(-1) for side, part in parts.items()}
    q, k, v = np.split(rows, [n_head * head_dim, (n_head + n_kv) * head_dim])
    return {"q": q, "k": k, "v": v}


def activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise ConvertError("config.json", f"an activation of {', '.join(ACTIVATIONS)}", name)
    return ACTIVATIONS[name]
