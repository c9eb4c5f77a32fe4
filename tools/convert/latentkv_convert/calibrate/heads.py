"""Second moments of q and k as attention sees them, but before RoPE: after bias, clamp and norm.

Per layer: k [w, w] of all KV heads together, and q [n_kv, head_dim, head_dim], added up over the query heads
of each KV head; both per token, float64, BOS included.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..ir import Array, ModelSpec
from ..recipe import Recipe
from .stream import LayerStream

VERSION = 2


def sample(recipe: Recipe) -> tuple[int, int]:
    return recipe.calib_tokens, recipe.calib_window


def collect(stream: LayerStream) -> Iterator[tuple[int, dict[str, Array]]]:
    with torch.no_grad(), stream.bar() as bar:
        for index, hidden, output in stream.forward():
            with stream.layer(index) as live:
                queries, keys = Meter(stream, live, "q"), Meter(stream, live, "k")
                for window in range(stream.n_windows):
                    output[window] = stream.run(live, index, hidden[window : window + 1])[0]
                    bar.update(1)
            yield index, {"q": queries.result(), "k": keys.result()[0]}


class Meter:
    """A hook on the last module before RoPE: the per-head norm where there is one, else the projection."""

    def __init__(self, stream: LayerStream, live: torch.nn.Module, side: str) -> None:
        spec = stream.spec
        self.limit = spec.keys.get("attention.clamp_kqv")
        self.blocks = spec.n_kv if side == "q" else 1  # q heads of a KV head share a block; K is one block
        self.width = spec.head_dim if side == "q" else spec.kv_width
        self.count = 0
        shape = (self.blocks, self.width, self.width)
        self.squares = torch.zeros(shape, dtype=torch.float64, device=stream.device)
        module: Any = live.get_submodule(norm_module(spec, side) or f"attn_{side}")
        module.register_forward_hook(self.add)

    def add(self, module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        rows = output if self.limit is None else output.clamp(-self.limit, self.limit)
        heads = rows.reshape(-1, self.width).double()  # [tokens·heads, width], heads of a token in order
        tokens = rows.shape[0] * rows.shape[1]
        repeats = heads.shape[0] // tokens // self.blocks
        blocks = heads.reshape(tokens, self.blocks, repeats, self.width).permute(1, 0, 2, 3)
        flat = blocks.reshape(self.blocks, tokens * repeats, self.width)
        self.squares += flat.transpose(1, 2) @ flat
        self.count += tokens

    def result(self) -> Array:
        return (self.squares / self.count).cpu().numpy()


def norm_module(spec: ModelSpec, side: str) -> str | None:
    """The per-head norm inside a layer, if it has one. (One over all heads is the projection's.)"""
    name = f"attn_{side}_norm"
    is_there = any(role.target == f"{name}.weight" for role in spec.layer_tensors)
    return name if is_there and not spec.norms_whole(side) else None
