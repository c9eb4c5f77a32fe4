"""Experts of an FFN in torch: the router chooses some of them for every token.

live: a layer (decoder.py) with the modules ffn_gate_inp, ffn_*_exps … of its tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..ir import ModelSpec

_SIGMOID = 2  # llama.cpp's number of it


def mixed(live: Any, spec: ModelSpec, x: Tensor, routed: Tensor) -> Tensor:
    """[tokens, d]: of each the weighed sum of the experts that the router chooses of `routed`."""
    weights, chosen = _routed(live, spec, live.ffn_gate_inp(routed))
    factors = live._modules.get("ffn_down_exps_scale")
    if factors is not None:
        weights = weights * factors.weight[chosen]
    narrow, wide = (live._modules.get(f"ffn_latent_{name}") for name in ("down", "up"))
    read = x if narrow is None else narrow(x)
    total = torch.zeros_like(read)
    for expert in chosen.unique().tolist():
        tokens, slots = (chosen == expert).nonzero(as_tuple=True)
        own = read[tokens]
        if spec.block.ffn == "plain_experts":
            y = live.activated(live.ffn_up_exps(own, expert))
            total = total.index_add(0, tokens, live.ffn_down_exps(y, expert) * weights[tokens, slots, None])
            continue
        if live._modules.get("ffn_gate_up_exps") is None:
            gate, up = live.ffn_gate_exps(own, expert), live.ffn_up_exps(own, expert)
        else:
            gate, up = live.ffn_gate_up_exps(own, expert).chunk(2, dim=-1)
        y = live.gated(gate, up)
        y = live.ffn_down_exps(y, expert) * weights[tokens, slots, None]
        total = total.index_add(0, tokens, y)
    total = total if wide is None else wide(total)
    return total if live._modules.get("ffn_up_shexp") is None else total + _shared(live, x)


def _routed(live: Any, spec: ModelSpec, made: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and numbers of each token's experts, [tokens, used]; made: by the router, [tokens,
    n_expert]."""
    n_used, is_normed = int(spec.keys["expert_used_count"]), spec.block.expert_norm
    is_sigmoid = spec.keys.get("expert_gating_func") == _SIGMOID
    scores = made.sigmoid() if is_sigmoid else made.softmax(-1)
    bias = live._modules.get("exp_probs_b")
    ranked = made if spec.block.ranked_before_sigmoid else scores
    ranked = ranked if bias is None else ranked + bias.weight
    n_groups = int(spec.keys.get("expert_group_count") or 1)
    n_chosen = int(spec.keys.get("expert_group_used_count") or n_groups)
    if n_chosen < n_groups:
        groups = ranked.unflatten(-1, (n_groups, -1))
        best = groups.topk(2 if is_sigmoid else 1, dim=-1).values.sum(-1).topk(n_chosen, dim=-1).indices
        kept = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, True)
        ranked = groups.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
    chosen = ranked.topk(n_used, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if is_normed:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * float(spec.keys.get("expert_weights_scale") or 1.0), chosen


def _shared(live: Any, x: Tensor) -> Tensor:
    """[tokens, d]: the expert of all tokens, times its gate if it has one."""
    up = live.ffn_up_shexp(x)
    is_plain = live._modules.get("ffn_gate_shexp") is None
    up = live.activated(up) if is_plain else live.gated(live.ffn_gate_shexp(x), up)
    output: Tensor = live.ffn_down_shexp(up)
    gate = live._modules.get("ffn_gate_inp_shexp")
    return output if gate is None else output * gate(x).sigmoid()


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
