"""llama.cpp's options of which GPUs run which layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from latentkv import ranges
from latentkv.errors import expected

SPLIT_MODES = ("none", "layer")  # by llama-cpp-python's numbers, LLAMA_SPLIT_MODE_NONE and _LAYER


@dataclass(frozen=True)
class Gpus:
    """The options under _core.Model's names. tensor_split: each GPU's share of the layers on GPUs, () = by
    free memory. main_gpu: the GPU that has all layers if split_mode is "none"."""

    tensor_split: tuple[float, ...] = ()
    main_gpu: int = 0
    split_mode: str = "layer"

    @staticmethod
    def of(tensor_split: Sequence[float] | None, main_gpu: int, split_mode: int | str) -> Gpus:
        """Arguments of Llama.

        Raises:
            LatentKVError: a share below 0, or an unsupported split mode ("row").
        """
        if not isinstance(tensor_split, Iterable | None):
            raise expected("tensor_split", "a list of shares", repr(tensor_split))
        shares = tuple(ranges.SHARE.check("tensor_split", share) for share in tensor_split or ())
        return Gpus(shares, ranges.MAIN_GPU.check("main_gpu", main_gpu), split_mode_word(split_mode))

    def options(self) -> dict[str, Any]:
        """_core.Model's keywords."""
        return {
            "tensor_split": list(self.tensor_split),
            "main_gpu": self.main_gpu,
            "split_mode": self.split_mode,
        }


BY_FREE_MEMORY = Gpus()


def split_mode_word(value: int | str) -> str:
    """0, 1, "none" or "layer", as a word."""
    if value in SPLIT_MODES:
        return str(value)
    if isinstance(value, int) and 0 <= value < len(SPLIT_MODES):
        return SPLIT_MODES[value]
    raise expected("split_mode", "0 (none) or 1 (layer), as a layer has one device", repr(value))
