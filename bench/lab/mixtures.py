"""A statistic for bench/lab/oscar.py: second moments of what attention hands to W_o, values mixed by scores.

Per layer: v [n_kv, head_dim, head_dim], added up over the query heads of each KV head; per token, float64,
BOS included.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from latentkv_convert.calibrate.stream import LayerStream
from latentkv_convert.ir import Array
from latentkv_convert.recipe import Recipe

VERSION = 1


def sample(recipe: Recipe) -> tuple[int, int]:
    return recipe.calib_tokens, recipe.calib_window


def collect(stream: LayerStream) -> Iterator[tuple[int, dict[str, Array]]]:
    spec = stream.spec
    shape = (spec.n_kv, spec.head_dim, spec.head_dim)
    with torch.no_grad(), stream.bar() as bar:
        for index, hidden, output in stream.forward():
            squares = torch.zeros(shape, dtype=torch.float64, device=stream.device)

            def add(module: nn.Module, inputs: tuple[Tensor, ...], squares: Tensor = squares) -> None:
                heads = inputs[0].double().reshape(-1, spec.n_kv, spec.n_head // spec.n_kv, spec.head_dim)
                squares += torch.einsum("tkri,tkrj->kij", heads, heads)

            with stream.layer(index) as live:
                live.get_submodule("attn_output").register_forward_pre_hook(add)
                for window in range(stream.n_windows):
                    output[window] = stream.run(live, index, hidden[window : window + 1])[0]
                    bar.update(1)
            yield index, {"v": (squares / stream.tokens.numel()).cpu().numpy()}
