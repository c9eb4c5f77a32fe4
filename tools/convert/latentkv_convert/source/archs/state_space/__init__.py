"""Architectures with layers of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060) beside some that attend.

Tensors have the names and layouts of llama.cpp's converter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ....errors import ConvertError
from ....ir import F32, TensorRole
from ...recurrent import Mamba2Sizes
from ...stock import Stock
from .. import require

RECURRENT, ATTENDS = ("linear_attention", "mamba"), ("full_attention", "attention")  # kinds, by any name
_LIMITS = {"heads": 1024, "width": 4096, "state": 1024, "groups": 1024}


def checked(sizes: Mamba2Sizes) -> Mamba2Sizes:
    """Raises:
    ConvertError: sizes that no reader follows.
    """
    for name, high in _LIMITS.items():
        if not 1 <= getattr(sizes, name) <= high:
            got = str(getattr(sizes, name))
            raise ConvertError("config.json", f"{name} of Mamba-2 from 1 to {high}", got)
    if sizes.heads % sizes.groups:
        expected = f"groups of Mamba-2 that divide its {sizes.heads} heads"
        raise ConvertError("config.json", expected, str(sizes.groups))
    if not 2 <= sizes.kernel <= 16:
        raise ConvertError("config.json", "a convolution of Mamba-2 over 2 to 16 tokens", str(sizes.kernel))
    return sizes


def recurrent(module: str, sizes: Mamba2Sizes, has_bias: bool) -> tuple[TensorRole, ...]:
    """Tensors of such a layer. has_bias: of the convolution."""

    def grouped(weight: F32) -> F32:
        return weight.reshape(sizes.groups, -1)

    roles = [
        TensorRole(f"{module}.in_proj.weight", "ssm_in.weight"),
        TensorRole(f"{module}.conv1d.weight", "ssm_conv1d.weight", "vector", transform=_kernels),
        TensorRole(f"{module}.conv1d.bias", "ssm_conv1d.bias", "vector"),
        TensorRole(f"{module}.dt_bias", "ssm_dt.bias", "vector"),
        TensorRole(f"{module}.A_log", "ssm_a", "vector", transform=_decay),
        TensorRole(f"{module}.D", "ssm_d", "vector", transform=_column),
        TensorRole(f"{module}.norm.weight", "ssm_norm.weight", "vector", transform=grouped),
        TensorRole(f"{module}.out_proj.weight", "ssm_out.weight"),
    ]
    return tuple(role for role in roles if has_bias or role.target != "ssm_conv1d.bias")


def _kernels(weight: F32) -> F32:
    """[channels, 1, kernel] -> [channels, kernel]"""
    return weight[:, 0]


def _column(weight: F32) -> F32:
    return weight[:, None]


def _decay(log: F32) -> F32:
    return -np.exp(log)[:, None]


def recurring(kinds: list[str], n_layer: int) -> list[bool]:
    """Which layers recur, of `layer_types`.

    Raises:
        ConvertError: kinds of other models, another number of them, or no layer that attends.
    """
    for kind in kinds:
        require({"layer_types": kind}, "layer_types", None, *RECURRENT, *ATTENDS)
    if len(kinds) != n_layer:
        raise ConvertError("config.json", f"{n_layer} layer_types, one a layer", str(len(kinds)))
    found = [kind in RECURRENT for kind in kinds]
    if all(found):
        raise ConvertError("config.json", "a layer that attends, whose K and V are cached", "none")
    return found


def kv_heads(stock: Stock, n_layer: int) -> list[int]:
    """Of every layer of the trunk, 0: it does not attend."""
    name = "attention.head_count_kv"
    value = stock.values.get(name)
    given: list[Any] = value if isinstance(value, list) else [value] * n_layer
    counts = [n for n in given if isinstance(n, int) and 0 <= n <= 4096]
    if len(counts) < n_layer or len(counts) < len(given):
        raise ConvertError(stock.where, f"{n_layer} values of {name}, one a layer", str(value)[:40])
    if not any(counts[:n_layer]):
        raise ConvertError(stock.where, f"a layer with KV heads in {name}", "none")
    return counts[:n_layer]


def sizes_of(stock: Stock) -> Mamba2Sizes:
    heads, inner = stock.whole("ssm.time_step_rank", 1, 1024), stock.whole("ssm.inner_size", 1, 1 << 20)
    if inner % heads:
        raise ConvertError(stock.where, f"ssm.inner_size a multiple of its {heads} heads", str(inner))
    state, groups = stock.whole("ssm.state_size", 1, 1024), stock.whole("ssm.group_count", 1, 1024)
    return Mamba2Sizes(heads, inner // heads, state, groups, stock.whole("ssm.conv_kernel", 2, 16))


def config_sizes(config: Mapping[str, Any], names: Mapping[str, str]) -> Mamba2Sizes:
    """names: of config.json's fields, by those of Mamba2Sizes."""
    return checked(Mamba2Sizes(**{name: int(config[field]) for name, field in names.items()}))
