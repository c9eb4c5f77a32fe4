"""Recurrent layers: their sizes, the shapes of their tensors, and a check that a model has them where it
says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ..errors import ConvertError
from ..ir import ModelSpec


@dataclass(frozen=True)
class Mamba2Sizes:
    """`heads` of `width` channels, each with `state` numbers a channel; `groups` of heads share what they
    write into their states and read of them; the convolution sees `kernel` tokens."""

    NAME: ClassVar[str] = "Mamba-2"
    OUTPUT: ClassVar[str] = "ssm_out.weight"  # what every such layer has, and no other
    heads: int
    width: int
    state: int
    groups: int
    kernel: int

    @staticmethod
    def of(spec: ModelSpec) -> Mamba2Sizes:
        names = ("time_step_rank", "inner_size", "state_size", "group_count", "conv_kernel")
        heads, inner, *others = (int(spec.keys[f"ssm.{name}"]) for name in names)
        return Mamba2Sizes(heads, inner // heads, *others)

    @property
    def keys(self) -> dict[str, int]:
        """Stock GGUF keys."""
        return {
            "ssm.conv_kernel": self.kernel,
            "ssm.state_size": self.state,
            "ssm.group_count": self.groups,
            "ssm.time_step_rank": self.heads,
            "ssm.inner_size": self.inner,
        }

    @property
    def inner(self) -> int:
        return self.heads * self.width

    @property
    def shared(self) -> int:
        return self.groups * self.state

    @property
    def channels(self) -> int:
        """What the convolution takes."""
        return self.inner + 2 * self.shared

    @property
    def state_floats(self) -> int:
        """As of a delta net."""
        return (self.kernel - 1) * self.channels + self.inner * self.state

    def shapes(self, n_embd: int) -> dict[str, tuple[int, ...]]:
        """Role -> shape."""
        return {
            "ssm_in.weight": (self.inner + self.channels + self.heads, n_embd),
            "ssm_conv1d.weight": (self.channels, self.kernel),
            "ssm_conv1d.bias": (self.channels,),
            "ssm_dt.bias": (self.heads,),
            "ssm_a": (self.heads, 1),
            "ssm_d": (self.heads, 1),
            "ssm_norm.weight": (self.groups, self.inner // self.groups),
            "ssm_out.weight": (n_embd, self.inner),
        }


@dataclass(frozen=True)
class ShortConvSizes:
    """A gated convolution of all channels, over `kernel` tokens."""

    NAME: ClassVar[str] = "a short convolution"
    OUTPUT: ClassVar[str] = "shortconv.out_proj.weight"
    channels: int
    kernel: int

    @staticmethod
    def of(spec: ModelSpec) -> ShortConvSizes:
        return ShortConvSizes(spec.n_embd, int(spec.keys["shortconv.l_cache"]))

    @property
    def keys(self) -> dict[str, int]:
        """Stock GGUF keys."""
        return {"shortconv.l_cache": self.kernel}

    @property
    def state_floats(self) -> int:
        """Of the latest inputs of the convolution alone."""
        return (self.kernel - 1) * self.channels

    def shapes(self, n_embd: int) -> dict[str, tuple[int, ...]]:
        """Role -> shape."""
        return {
            "shortconv.in_proj.weight": (3 * n_embd, n_embd),
            "shortconv.conv.weight": (n_embd, self.kernel),
            self.OUTPUT: (n_embd, n_embd),
        }


@dataclass(frozen=True)
class DeltaNetSizes:
    """Heads of `width` channels, n_k for Q and K and n_v for V, of which `shared` have the same Q and K; the
    convolution sees `kernel` tokens."""

    NAME: ClassVar[str] = "a delta net"
    OUTPUT: ClassVar[str] = "ssm_out.weight"
    n_k: int
    n_v: int
    width: int
    kernel: int

    @staticmethod
    def of(spec: ModelSpec) -> DeltaNetSizes:
        names = ("group_count", "time_step_rank", "state_size", "conv_kernel")
        return DeltaNetSizes(*(int(spec.keys[f"ssm.{name}"]) for name in names))

    @property
    def keys(self) -> dict[str, int]:
        """Stock GGUF keys."""
        return {
            "ssm.conv_kernel": self.kernel,
            "ssm.state_size": self.width,
            "ssm.group_count": self.n_k,
            "ssm.time_step_rank": self.n_v,
            "ssm.inner_size": self.inner,
        }

    @property
    def shared(self) -> int:
        return self.n_v // self.n_k

    @property
    def inner(self) -> int:
        """Channels of V."""
        return self.n_v * self.width

    @property
    def channels(self) -> int:
        """Channels of Q, K and V, which the convolution takes."""
        return 2 * self.n_k * self.width + self.inner

    @property
    def state_floats(self) -> int:
        """Numbers that a layer keeps of a sequence: the latest inputs of the convolution, and a matrix for
        each head of V."""
        return (self.kernel - 1) * self.channels + self.inner * self.width

    def shapes(self, n_embd: int) -> dict[str, tuple[int, ...]]:
        """Role -> shape."""
        rows = {"attn_qkv": self.channels, "attn_gate": self.inner}
        rows |= {"ssm_ba": 2 * self.n_v, "ssm_beta": self.n_v, "ssm_alpha": self.n_v}
        return {
            **{f"{stem}.weight": (n, n_embd) for stem, n in rows.items()},
            "ssm_conv1d.weight": (self.channels, self.kernel),
            "ssm_dt.bias": (self.n_v,),
            "ssm_a": (self.n_v,),
            "ssm_norm.weight": (self.width,),
            "ssm_out.weight": (n_embd, self.inner),
        }

    def tiled(self, width: int) -> NDArray[np.int64]:
        """Rows of a checkpoint, which has value heads beside those that share their keys, in file order:
        first a head of every key head, then the next of each. width: rows of a head."""
        heads = np.arange(self.n_v).reshape(self.n_k, self.shared).T.reshape(-1)
        rows: NDArray[np.int64] = (heads[:, None] * width + np.arange(width)).reshape(-1)
        return rows

    def behind_keys(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of Q, K and V together, V in this order."""
        n = 2 * self.n_k * self.width
        return np.concatenate([np.arange(n), n + rows])


Sizes = DeltaNetSizes | Mamba2Sizes | ShortConvSizes


def kind(spec: ModelSpec) -> str:
    """The mixer of the model's recurrent layers; "" if there are none."""
    return next((mixer for mixer in spec.block.mixers or () if mixer in _KINDS), "")


def sizes(spec: ModelSpec) -> Sizes:
    """The sizes of a model that has recurrent layers."""
    return _KINDS[kind(spec)].of(spec)


_KINDS: dict[str, type[DeltaNetSizes] | type[Mamba2Sizes] | type[ShortConvSizes]] = {
    "delta_net": DeltaNetSizes,
    "mamba2": Mamba2Sizes,
    "short_conv": ShortConvSizes,
}


def shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Role -> shape."""
    return sizes(spec).shapes(spec.n_embd)


def check_pattern(spec: ModelSpec, where: str, has: Callable[[str, int], bool]) -> None:
    """has(role, layer): whether the tensor is there.

    Raises:
        ConvertError: a layer has tensors of the other kind.
    """
    if spec.block.mixers is None:
        return
    own_of = {"attention": ("attn_q.weight", "attention")}
    own_of |= {kind: (sizes.OUTPUT, sizes.NAME) for kind, sizes in _KINDS.items()}
    for layer, mixer in enumerate(spec.block.mixers):
        if mixer not in own_of:  # an FFN alone, which is missed as such
            continue
        own, name = own_of[mixer]
        if not has(own, layer):
            expected = f"{name} in layer {layer}, as the pattern of layers says"
            raise ConvertError(where, expected, f"no tensor {own}")
