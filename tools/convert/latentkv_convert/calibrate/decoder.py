"""The decoder block of a ModelSpec in torch, f32: what native/src/graph/graph.cpp is to the runtime.

Modules have the names of their tensors in the file (attn_norm, attn_q, …, ffn_down), so that a statistic
hooks the same one in every architecture. Rows of heads are in transformers' order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..compute import floats
from ..ir import ModelSpec, module_name
from ..source.source import Source
from . import experts
from .attention import attention
from .carried import Carried, Rows
from .mixers import mixed, mla
from .mixers.recurrence import Numbers
from .normed import HeadNorm, NormedLinear
from .positions import LayerPositions, Positions

FFN_TOKENS = 512
Watch = Callable[[str, Tensor], Tensor]
_OAI_ALPHA, _OAI_LIMIT = 1.702, 7.0
# Not in bf16: what is measured, what chooses, and what decides how long a state is kept.
_PRECISE = (
    "attn_k",
    "attn_v",
    "attn_kv_a_mqa",
    "ffn_gate_inp",
    "ffn_gate_inp_shexp",
    "ssm_alpha",
    "ssm_beta",
    "ssm_ba",
)
# Stems of a recurrent layer -> where its weight and its bias are.
_NUMBERS = {
    "ssm_conv1d": ("ssm_conv1d.weight", "ssm_conv1d.bias"),
    "ssm_a": ("ssm_a", "ssm_a.bias"),
    "ssm_d": ("ssm_d", "ssm_d.bias"),
    "ssm_dt": ("ssm_dt.weight", "ssm_dt.bias"),
    "shortconv.conv": ("shortconv.conv.weight", "shortconv.conv.bias"),
}
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}


def unwatched(name: str, rows: Tensor) -> Tensor:
    return rows


class Norm(nn.Module):
    """Over the last dimension."""

    def __init__(self, weight: Tensor, bias: Tensor | None, kind: str, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.kind, self.eps = kind, eps

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "layer":
            return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        y = functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return y if self.bias is None else y + self.bias


class Bf16Linear(nn.Linear):
    """Frozen, with products of bf16 numbers that are added up in f32; input and output are f32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight = nn.Parameter(linear.weight.bfloat16(), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        y = functional.linear(x.bfloat16(), self.weight).float()
        return y if self.bias is None else y + self.bias


class Sinks(nn.Module):
    """[n_head] logits that take part in the softmax."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)


class Scale(nn.Module):
    """A factor, or one of every number."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Layer(nn.Module):
    """One block with the weights of a source: [n, T, d] -> [n, T, d], d with what is carried. reduced: all
    projections but those of K and V, whose outputs are measured, multiply in bf16.

    watch(name, rows) is shown the projections' outputs q, k and v [n, T, w] and, where heads have norms, what
    comes out of these, q_norm and k_norm [n, T, heads, head_dim]. What it returns takes their place. A layer
    that does not attend shows nothing.
    """

    attn_q: nn.Module
    attn_k: nn.Module
    attn_v: nn.Module
    attn_output: nn.Module
    attn_k_norm: Norm  # where there is one
    ffn_up: nn.Module
    ffn_down: nn.Module

    def __init__(self, source: Source, index: int, reduced: bool = False) -> None:
        super().__init__()
        self.spec, self.index = source.spec.at(index), index
        self.carried, self.rows_of = Carried.of(source.spec), source.spec.rows_of(index)
        self.attends = self.spec.attends(index)
        roles = {role.target for role in self.spec.tensors_of(index)}
        stems = {role.rpartition(".")[0] or role for role in roles}
        if self.attends and self.spec.mla is None:
            stems |= {"attn_q"} if self.spec.shares_kv else {"attn_q", "attn_k", "attn_v"}
        for stem in sorted(stems):
            of = "attn_k" if stem == "attn_v" and self.spec.value_of_key else stem
            setattr(self, module_name(f"{stem}.weight"), _module(source, of, index))
        for stem in sorted(role.removesuffix(".scale") for role in roles if role.endswith(".scale")):
            setattr(self, f"{stem}_scale", Scale(_tensor(source, f"{stem}.scale", index)))
        if self.carried is not None and self.carried.brings:
            self.brought = Brought(source, index)
        if self.spec.block.value_norm and "attn_v" in stems:
            eps = float(self.spec.keys["attention.layer_norm_rms_epsilon"])
            made = self._modules.pop("attn_v")
            assert isinstance(made, nn.Linear)
            self.attn_v = NormedLinear(made, HeadNorm(self.spec.head_dim, eps))
        for side in filter(self.spec.norms_whole, "qk" if self.attends else ""):
            projection, norm = (self._modules.pop(f"attn_{side}{end}") for end in ("", "_norm"))
            assert isinstance(projection, nn.Linear)
            assert isinstance(norm, Norm)
            setattr(self, f"attn_{side}", NormedLinear(projection, norm))
        if self.spec.block.norm_after_rope:
            self._norm_before_rope()
        self.feeds = "ffn_down" in stems or "ffn_down_exps" in stems
        if self.spec.mixer(index) == "none":
            self.ffn_norm = self._modules.pop("attn_norm")
        elif self.feeds and not self.spec.block.parallel and not {"ffn_norm", "post_ffw_norm"} & stems:
            self.ffn_norm = self._modules.pop("post_attention_norm")  # a branch has a norm, so this is its
        for name in ("post_attention_norm", "post_ffw_norm") if self.spec.block.post_norm_epsilon else ():
            norm = self._modules[name]
            assert isinstance(norm, Norm)
            norm.eps = self.spec.block.post_norm_epsilon
        for name, module in list(self.named_children()) if reduced else []:
            if type(module) is nn.Linear and name not in _PRECISE:
                setattr(self, name, Bf16Linear(module))

    def _norm_before_rope(self) -> None:
        """RoPE leaves the mean square as it is: norms without a weight stand before it. Their weights
        multiply the turned queries, which scores cannot tell apart."""
        norms = [self.get_submodule(f"attn_{side}_norm") for side in "qk"]
        weight = torch.ones(self.spec.head_dim)
        for norm in norms:
            assert isinstance(norm, Norm)
            weight = weight * norm.weight
            norm.weight = nn.Parameter(torch.ones_like(norm.weight), requires_grad=False)
        self.attn_q_scale = Scale(weight)

    def forward(self, x: Tensor, positions: Positions, watch: Watch = unwatched) -> Tensor:
        return self.fed(x, self.attended(x, positions, watch))

    def attended(self, x: Tensor, positions: Positions, watch: Watch = unwatched) -> Tensor:
        """x and what attention, or what is in its place, adds to it."""
        if self.spec.mixer(self.index) == "none":
            return x
        read, made, carried = self.attention_input(x), None, self.carried
        if self.attends:
            given = carried.rows(x, self.rows_of)[0] if carried is not None and self.spec.shares_kv else None
            branch, made = self.attend(read, positions.of(self.index), watch, given)
        else:
            branch = mixed(self.spec.mixer(self.index), self, self.spec, read)
        branch = self._branch(branch, "post_attention_norm")
        if carried is None:
            return x + branch
        n = carried.n_embd
        attended = torch.cat([x[..., :n] + branch, x[..., n:]], dim=-1)
        if made is None or self.index not in carried.heads:
            return attended
        return carried.with_rows(attended, self.index, *made)

    def fed(self, x: Tensor, attended: Tensor) -> Tensor:
        """The block's output, of its input and of what attention made of that."""
        return torch.cat([self._fed(x[:, part], attended[:, part]) for part in self.parts(x)], dim=1)

    def fed_slope(self, x: Tensor, attended: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of `fed` by x and attended, of `above`, that by its output. What the output itself is,
        nothing here asks: where it does not go through a norm, its last product is left out."""
        of_x, of_attended = torch.zeros_like(x), torch.empty_like(attended)
        skipped = self._optional("post_ffw_norm") is None and not self.spec.has_experts
        for part in self.parts(x):
            bottom, middle = (each[:, part].detach().requires_grad_() for each in (x, attended))
            with torch.enable_grad():
                output = self._fed(bottom, middle, skipped)
            own, other = torch.autograd.grad(output, (bottom, middle), above[:, part], allow_unused=True)
            of_attended[:, part] = other
            if own is not None:
                of_x[:, part] = own
        return of_x, of_attended

    def parts(self, x: Tensor) -> Iterator[slice]:
        """Tokens of x [n, T, d] that go through the FFN together: on a processor as many as leave its states
        in the cache."""
        whole = x.device.type != "cpu" or self.spec.has_experts
        size = x.shape[1] if whole else FFN_TOKENS
        for begin in range(0, x.shape[1], size):
            yield slice(begin, begin + size)

    def _fed(self, x: Tensor, attended: Tensor, unread: bool = False) -> Tensor:
        if self.carried is not None:
            n = self.carried.n_embd
            state = self._fed_state(x[..., :n], attended[..., :n], unread)
            if self.carried.brings:
                state = state + self.brought(self, state, *self.carried.token(attended))
            return torch.cat([self._normed("layer_output_scale", state), attended[..., n:]], dim=-1)
        return self._normed("layer_output_scale", self._fed_state(x, attended, unread))

    def _fed_state(self, x: Tensor, attended: Tensor, unread: bool) -> Tensor:
        if not self.feeds:
            return attended
        parallel = self.spec.block.parallel
        normed = self._normed("attn_norm", x) if parallel else self._normed("ffn_norm", attended)
        if self.spec.block.ffn == "gated_and_experts":
            fed = experts.beside_dense(self, self.spec, normed, attended)
        else:
            fed = self.feed(normed, unread)
        return attended + self._branch(fed, "post_ffw_norm")

    def attention_input(self, x: Tensor) -> Tensor:
        """What attn_q, attn_k and attn_v read, of the block's input x."""
        x = x[..., : self.spec.n_embd]
        own = self._optional("attn_norm_2")  # Falcon's, of the attention alone
        return self._normed("attn_norm", x) if own is None else own(x)

    def attend(
        self, x: Tensor, positions: LayerPositions, watch: Watch = unwatched, given: Rows | None = None
    ) -> tuple[Tensor, Rows | None]:
        """What attention makes of its input, and the K and V that it reads; given: those of another layer."""
        if self.spec.mla is not None:
            return mla.attended(self, self.spec, self.spec.mla, x, positions, watch), None
        sides = "qkv" if given is None else "q"
        rows = {side: self.get_submodule(f"attn_{side}")(x) for side in sides}
        gate = None
        if self.spec.block.output_gate:  # of each head beside its query
            rows["q"], gate = (
                part.flatten(2) for part in rows["q"].unflatten(-1, (self.spec.n_head, -1)).chunk(2, dim=-1)
            )
        projected = {side: watch(side, rows[side]) for side in sides}
        q, *made = (self.heads(side, rows, watch) for side, rows in projected.items())
        q = self._normed("attn_q_scale", positions.queries(q))
        k, v = (positions.with_rope(made[0]), made[1]) if given is None else given
        sinks, softcap = self._optional("attn_sinks"), self.spec.block.attention_softcap
        is_causal, scale = positions.mask is None, self.spec.attention_scale
        if sinks is not None or softcap:
            own = None if sinks is None else sinks.weight
            mixed = attention(q, k, v, own, softcap, positions.mask, is_causal, scale)
        else:
            mixed = functional.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=positions.mask,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=self.spec.n_kv != self.spec.n_head,
            )
        heads = mixed.transpose(1, 2).flatten(2)
        if self.spec.block.gate != "none":
            heads = self._gated(heads, self.get_submodule("attn_gate")(x))
        output: Tensor = self.attn_output(heads if gate is None else heads * gate.sigmoid())
        return output, (k, v)

    def _gated(self, heads: Tensor, gate: Tensor) -> Tensor:
        """[n, T, w] times the gate of each number, or of each head."""
        opened = functional.softplus(gate) if self.spec.block.gate == "softplus" else gate.sigmoid()
        parts = (x.unflatten(-1, (self.spec.n_head, -1)) for x in (heads, opened))
        return next(parts).mul(next(parts)).flatten(2)

    def heads(self, side: str, rows: Tensor, watch: Watch = unwatched) -> Tensor:
        """A projection's output [n, T, w] -> [n, heads, T, head_dim] before RoPE."""
        limit = self.spec.keys.get("attention.clamp_kqv")
        if limit is not None:
            rows = rows.clamp(-limit, limit)
        heads = rows.unflatten(-1, (-1, self.spec.head_dim))
        norm = self._optional(f"attn_{side}_norm")
        return (heads if norm is None else watch(f"{side}_norm", norm(heads))).transpose(1, 2)

    def feed(self, x: Tensor, unread: bool = False) -> Tensor:
        """unread: zeros, with the gradients that the output has."""
        if self._optional("ffn_gate_inp") is not None and self.spec.block.ffn in ("experts", "plain_experts"):
            rows = x.flatten(0, -2)
            return experts.mixed(self, self.spec, rows, rows).view_as(x)
        activation = self.spec.block.activation
        up = self.ffn_up(x)
        if self.spec.block.ffn != "plain":
            gate = self._optional("ffn_gate")
            first, up = up.chunk(2, dim=-1) if gate is None else (gate(x), up)
            up = self.gated(first, up)
        else:
            up = self._xielu(up) if activation == "xielu" else self.activated(up)
        output: Tensor = _Unread.apply(up, self.ffn_down.weight) if unread else self.ffn_down(up)
        return output

    def activated(self, x: Tensor) -> Tensor:
        return _ACTIVATIONS[self.spec.block.activation](x)

    def _xielu(self, x: Tensor) -> Tensor:
        """arXiv 2411.13010; numbers as checkpoints have them."""
        alpha_n, alpha_p, beta, eps = (
            torch.tensor(self.spec.keys[f"xielu.{name}"][self.index])
            for name in ("alpha_n", "alpha_p", "beta", "eps")
        )
        negative = (torch.expm1(x.clamp(max=float(eps))) - x) * (beta + functional.softplus(alpha_n))
        return torch.where(x > 0, functional.softplus(alpha_p) * x * x, negative) + beta * x

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        activation = self.spec.block.activation
        if activation != "swiglu_oai":
            return _ACTIVATIONS[activation](gate) * up
        gate, up = gate.clamp(max=_OAI_LIMIT), up.clamp(-_OAI_LIMIT, _OAI_LIMIT)
        return gate * torch.sigmoid(_OAI_ALPHA * gate) * (up + 1)

    def _normed(self, name: str, x: Tensor) -> Tensor:
        """A layer without this norm, or scale, leaves x as it is."""
        norm = self._optional(name)
        return x if norm is None else norm(x)

    def _branch(self, x: Tensor, post_norm: str) -> Tensor:
        """What is added to the hidden state."""
        return self._normed(post_norm, x) * self.spec.block.residual_scale

    def _optional(self, name: str) -> Any:
        return self._modules.get(name)


class Brought(nn.Module):
    """What tokens bring to a layer: numbers of their own, [n_vocab, w], and w of their embeddings."""

    def __init__(self, source: Source, index: int) -> None:
        super().__init__()
        width = int(source.spec.keys["embedding_length_per_layer_input"])
        own = slice(index * width, (index + 1) * width)
        table = floats.tensor(source.columns("per_layer_token_embd.weight", own))
        self.table = nn.Parameter(table, requires_grad=False)
        self.made = linear(_tensor(source, "per_layer_model_proj.weight")[own].clone(), None)
        self.norm = _module(source, "per_layer_proj_norm", None)
        self.scales = math.sqrt(width), 1 / math.sqrt(source.spec.n_embd)

    def forward(self, layer: Layer, state: Tensor, tokens: Tensor, embedded: Tensor) -> Tensor:
        """What is added behind the FFN."""
        own, other = self.scales
        part = functional.embedding(tokens, self.table) * own + self.norm(self.made(embedded) * other)
        gate = _ACTIVATIONS[layer.spec.block.activation](layer.get_submodule("inp_gate")(state))
        made: Tensor = layer.get_submodule("post_norm")(
            layer.get_submodule("proj")(gate * part * math.sqrt(0.5))
        )
        return made


class _Unread(torch.autograd.Function):
    """x [..., in] times weight [out, in], of which only the gradient by x is computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return x.new_zeros(()).expand(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None]:
        weight: Tensor = ctx.weight
        return (slopes[0].to(weight.dtype) @ weight).float(), None


class Ends(nn.Module):
    """What is before the first layer and after the last: token ids to hidden states, and those to logits.
    reduced: logits are products of bf16."""

    def __init__(self, source: Source, reduced: bool = False) -> None:
        super().__init__()
        self.spec: ModelSpec = source.spec
        self.carried = Carried.of(self.spec)
        self.token_embd = nn.Parameter(_tensor(source, "token_embd.weight"), requires_grad=False)
        self.position_embd = None
        if self.spec.block.position == "learned":
            self.position_embd = nn.Parameter(_tensor(source, "position_embd.weight"), requires_grad=False)
        norm = "output_norm" if source.has("output_norm.weight") else "token_embd_norm"
        self.output_norm = _module(source, norm, None)
        self.output = None
        if source.has("output.weight"):
            self.output = nn.Parameter(_tensor(source, "output.weight"), requires_grad=False)
        head = self.token_embd if self.output is None else self.output
        self.head = head.bfloat16() if reduced else head

    def embed(self, tokens: Tensor) -> Tensor:
        """[n, T] -> [n, T, d]"""
        x = functional.embedding(tokens, self.token_embd)
        if self.spec.block.embedding_norm:
            eps = float(self.spec.keys["attention.layer_norm_rms_epsilon"])
            x = functional.rms_norm(x, x.shape[-1:], eps=eps)
        x = x * self.spec.block.embedding_scale
        x = x if self.position_embd is None else x + self.position_embd[: tokens.shape[-1]]
        return x if self.carried is None else self.carried.embedded(x, tokens)

    def logits(self, x: Tensor) -> Tensor:
        """[n, T, d] -> [n, T, n_vocab]"""
        normed = self.output_norm(x[..., : self.spec.n_embd])
        return self._scaled(functional.linear(normed.to(self.head.dtype), self.head).float())

    def logits_of(self, x: Tensor, entries: Tensor) -> Tensor:
        """[n, T, k]: those of entries [n, T, k] of the vocabulary."""
        normed = self.output_norm(x[..., : self.spec.n_embd])
        return self._scaled((normed[..., None, :] * self.head[entries]).sum(-1))

    def _scaled(self, logits: Tensor) -> Tensor:
        scale, cap = self.spec.block.logit_scale, self.spec.block.logit_softcap
        logits = logits if scale == 1 else logits * scale
        return cap * torch.tanh(logits / cap) if cap else logits


class Decoder(nn.Module):
    """A whole model: token ids [n, T] to logits [n, T, n_vocab]."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.spec: ModelSpec = source.spec
        self.ends = Ends(source)
        self.layers = nn.ModuleList(Layer(source, index) for index in range(self.spec.n_layer))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.ends.embed(tokens)
        positions = Positions(self.spec, tokens.shape[-1], x.device)
        for layer in self.layers:
            x = layer(x, positions)
        return self.ends.logits(x)


def _module(source: Source, stem: str, layer: int | None) -> nn.Module:
    """A norm, or a linear map or one of every expert, with its bias if there is one."""
    if stem in _NUMBERS:
        return Numbers(*(_found(source, role, layer) for role in _NUMBERS[stem]))
    if stem == "exp_probs_b":
        return Scale(_tensor(source, "exp_probs_b.bias", layer))
    weight = _tensor(source, f"{stem}.weight", layer)
    weight = weight[None] if stem == "ffn_gate_inp_shexp" and weight.ndim == 1 else weight
    bias = _tensor(source, f"{stem}.bias", layer) if source.has(f"{stem}.bias", layer) else None
    if "norm" in stem:
        kind = source.spec.block.norm
        name = "attention.layer_norm_rms_epsilon" if kind == "rms" else "attention.layer_norm_epsilon"
        return Norm(weight, bias, kind, float(source.spec.keys.get(name, 1e-5)))
    if stem == "attn_sinks":
        return Sinks(weight)
    if stem == "layer_output_scale":
        return Scale(weight)
    if stem.endswith("_exps") or weight.ndim == 3:
        return experts.Stacked(weight, bias)
    return linear(weight, bias)


def _found(source: Source, role: str, layer: int | None) -> Tensor | None:
    return _tensor(source, role, layer) if source.has(role, layer) else None


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Frozen; weight [out, in]."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


def _tensor(source: Source, role: str, layer: int | None = None) -> Tensor:
    return floats.tensor(source.tensor(role, layer))
