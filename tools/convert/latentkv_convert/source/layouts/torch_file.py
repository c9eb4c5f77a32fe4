"""Reads one PyTorch state dict: pytorch_model.bin or a shard of it. It is memory-mapped, and no code in the
pickle is run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ConvertError, need
from ...ir import F32


class TorchFile:
    """Tensors of one file by name.

    Raises:
        ConvertError: a file that is damaged or something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        torch = need("torch")
        try:
            self._tensors: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch raises half a dozen types for a damaged pickle
            got = f"{type(error).__name__}: {error}"
            raise ConvertError(path.name, "a PyTorch state dict", got) from None

    def names(self) -> Iterable[str]:
        return self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def is_fp8(self, name: str) -> bool:
        return "float8" in str(self._tensors[name].dtype)

    def read(self, name: str) -> F32:
        """The tensor as float32."""
        tensor = self._tensors[name]
        if not tensor.is_floating_point():
            where = f"{self.path.name}: {name}"
            raise ConvertError(where, "a floating-point tensor", str(tensor.dtype))
        return np.asarray(tensor.float().numpy())

    def columns(self, name: str, part: slice) -> F32:
        """Some of a matrix."""
        return np.asarray(self._tensors[name][:, part].float().numpy())
