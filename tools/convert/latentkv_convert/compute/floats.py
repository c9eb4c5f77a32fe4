"""NumPy's arrays in torch: what is measured on a device; whole weights from one float type to another, and
looked over: a model is read three times, and NumPy does each of these on one core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ConvertError
from ..ir import F32, Array

if TYPE_CHECKING:
    from torch import Tensor


# Names in safetensors of types that NumPy lacks -> in torch.
BITS = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}


def f32(raw: Array, kind: str) -> F32:
    """A float32 array. kind: the type of the numbers whose bits `raw` are, if it is in BITS."""
    import torch

    found = tensor(raw)
    return np.asarray((found.view(getattr(torch, BITS[kind])) if kind in BITS else found).float().numpy())


def f16(array: F32) -> Array:
    return np.asarray(tensor(array).half().numpy())


def peak(array: F32) -> float:
    """The largest magnitude; NaN if the array contains one."""
    import torch

    if not array.size:
        return 0.0
    low, high = torch.aminmax(tensor(array))
    return max(abs(float(low)), abs(float(high))) if float(low) == float(low) else float("nan")


def check_finite(array: F32, where: str) -> None:
    """Raises:
    ConvertError: NaN or infinity among them.
    """
    if not np.isfinite(peak(array)):
        raise ConvertError(where, "finite weights", f"{int((~np.isfinite(array)).sum())} that are not")


def tensor(array: Array, device: str = "cpu") -> Tensor:
    """A tensor. It shares the array's memory if the array is writable and the device is the CPU."""
    import torch

    safe: Any = array if array.flags.writeable and array.flags.c_contiguous else np.array(array, order="C")
    return torch.from_numpy(safe).to(device)
