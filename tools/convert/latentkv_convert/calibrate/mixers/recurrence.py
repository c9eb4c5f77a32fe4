"""What recurrent mixers share: parameters, the convolution before the recurrence, and the recurrences, which
are functions of transformers' models."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from ...errors import ConvertError, need


def recurrence(module: str, name: str) -> Any:
    """The function `name` of transformers.models.`module`.

    Raises:
        ConvertError: transformers has no such function.
    """
    need("transformers")
    where = f"transformers.models.{module}"
    try:
        return getattr(import_module(where), name)
    except (ImportError, AttributeError) as error:
        raise ConvertError("convert", f"a transformers with {where}", str(error), "upgrade it") from None


def convolved(rows: Tensor, kernels: Numbers) -> Tensor:
    """rows [n, T, channels], kernels [channels, kernel]: of every channel the latest tokens."""
    weight, bias = kernels.weight, kernels.bias
    padded = functional.pad(rows.transpose(1, 2), (weight.shape[1] - 1, 0))
    return functional.conv1d(padded, weight[:, None], bias, groups=len(weight)).transpose(1, 2)


class Numbers(nn.Module):
    """The parameters of a recurrent layer that are no linear map: kernels, decays and their offsets."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, weight: Tensor | None, bias: Tensor | None) -> None:
        super().__init__()
        for name, value in (("weight", weight), ("bias", bias)):
            self.register_parameter(name, None if value is None else nn.Parameter(value, requires_grad=False))
