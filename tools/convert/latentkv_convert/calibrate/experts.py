"""Experts of an FFN in torch: the router chooses some of them for every token.

live: a layer (decoder.py) with the modules ffn_gate_inp, ffn_*_exps … of its tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..ir import ModelSpec


def mixed(live: Any, spec: ModelSpec, x: Tensor, routed: Tensor) -> Tensor:
    """[tokens, d]: of each the weighed sum of the experts that the router chooses of `routed`."""
    scores = live.ffn_gate_inp(routed)
    n_used, is_normed = int(spec.keys["expert_used_count"]), spec.block.expert_norm
    top, chosen = scores.topk(n_used, dim=-1)
    weights = top.softmax(-1) if is_normed else scores.softmax(-1).gather(-1, chosen)
    factors = live._modules.get("ffn_down_exps_scale")
    if factors is not None:
        weights = weights * factors.weight[chosen]
    total = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        tokens, slots = (chosen == expert).nonzero(as_tuple=True)
        own = x[tokens]
        if live._modules.get("ffn_gate_up_exps") is None:
            gate, up = live.ffn_gate_exps(own, expert), live.ffn_up_exps(own, expert)
        else:
            gate, up = live.ffn_gate_up_exps(own, expert).chunk(2, dim=-1)
        y = live.gated(gate, up)
        y = live.ffn_down_exps(y, expert) * weights[tokens, slots, None]
        total = total.index_add(0, tokens, y)
    return total if live._modules.get("ffn_gate_inp_shexp") is None else total + _shared(live, x)


def _shared(live: Any, x: Tensor) -> Tensor:
    """[tokens, d]: the expert of all tokens, times its gate."""
    up = live.gated(live.ffn_gate_shexp(x), live.ffn_up_shexp(x))
    output: Tensor = live.ffn_down_shexp(up) * live.ffn_gate_inp_shexp(x).sigmoid()
    return output


def beside_dense(live: Any, spec: ModelSpec, x: Tensor, hidden: Tensor) -> Tensor:
    """The dense FFN of x, and experts of the hidden state."""
    eps = float(spec.keys["attention.layer_norm_rms_epsilon"])
    width = hidden.shape[-1]
    routed = live.ffn_gate_inp_scale(functional.rms_norm(hidden, (width,), None, eps)) * width**-0.5
    read = live.pre_ffw_norm_2(hidden)
    chosen = mixed(live, spec, read.flatten(0, -2), routed.flatten(0, -2)).view_as(read)
    output: Tensor = live.post_ffw_norm_1(live.feed(x)) + live.post_ffw_norm_2(chosen)
    return output


class Stacked(nn.Module):
    """A linear map of every expert: weight [n_expert, out, in], bias [n_expert, out]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor, expert: int) -> Tensor:
        return functional.linear(x, self.weight[expert], None if self.bias is None else self.bias[expert])
