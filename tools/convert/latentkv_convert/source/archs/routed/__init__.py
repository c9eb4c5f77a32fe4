"""Architectures with routed experts: a router scores the experts of a layer for every token, and the best
ones are the token's, beside one that all tokens have. The first layers may be without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .... import limits
from ....errors import ConvertError
from ....ir import ModelSpec, TensorRole
from ...stock import Stock
from .. import expert_keys, warn_of_readers

GATING = {"softmax": 1, "sigmoid": 2}  # llama.cpp's numbers
STOCK_KEYS = (
    *("expert_count", "expert_used_count", "expert_shared_count", "expert_gating_func"),
    *("expert_weights_norm", "expert_weights_scale", "leading_dense_block_count"),
)
SEVERAL = {
    "n_expert": "n_routed_experts",
    "n_used": "num_experts_per_tok",
    "width": "moe_intermediate_size",
    "is_normed": "norm_topk_prob",
    "scale": "routed_scaling_factor",
    "n_dense": "first_k_dense_replace",
}
_MAPS = ("gate", "up", "down")


@dataclass(frozen=True)
class Experts:
    n_expert: int
    n_used: int  # for each token
    width: int  # of one
    shared: int = 0  # width of the expert that all tokens have; 0: there is none
    scores: str = "sigmoid"
    is_normed: bool = True  # weights of the chosen experts are divided by their sum
    scale: float = 1.0  # of the weights
    n_dense: int = 0  # first layers without experts


@dataclass(frozen=True)
class Names:
    """Names of a checkpoint's tensors, in a layer."""

    router: str = "mlp.gate.weight"
    # of the scores by which experts are chosen; "": there is none
    bias: str = "mlp.gate.e_score_correction_bias"
    each: str = "mlp.experts.{}.*_proj.weight"  # * stands for gate, up and down
    shared: str = "mlp.shared_experts.*_proj.weight"
    maps: Mapping[str, str] = field(default_factory=dict)  # gate, up, down, where they have other names


def with_experts(spec: ModelSpec, experts: Experts, names: Names) -> ModelSpec:
    """spec: of a model without experts, whose FFN the first layers have."""
    if not 0 <= experts.n_dense < spec.n_layer:
        expected = f"a layer with experts among {spec.n_layer}"
        raise ConvertError("config.json", expected, f"{experts.n_dense} without them")
    maps = {f"ffn_{name}.weight" for name in _MAPS}
    others = tuple(role for role in spec.layer_tensors if role.target not in maps)
    roles = [TensorRole(names.router, "ffn_gate_inp.weight", "vector")]
    if names.bias:
        roles.append(TensorRole(names.bias, "exp_probs_b.bias", "vector"))
    for name in _MAPS:
        roles.append(
            TensorRole(
                names.each.replace("*", names.maps.get(name, name)),
                f"ffn_{name}_exps.weight",
                n_expert=experts.n_expert,
            )
        )
        if experts.shared:
            roles.append(TensorRole(names.shared.replace("*", name), f"ffn_{name}_shexp.weight"))
    keys = {
        **spec.keys,
        **expert_keys(experts.n_expert, experts.n_used, experts.width),
        "expert_gating_func": GATING[experts.scores],
        "expert_weights_norm": experts.is_normed,
        "expert_weights_scale": experts.scale,
        "leading_dense_block_count": experts.n_dense,
    }
    if experts.shared:
        keys |= {"expert_shared_count": 1, "expert_shared_feed_forward_length": experts.shared}
    return replace(
        spec,
        block=replace(spec.block, ffn="experts", expert_norm=experts.is_normed),
        layer_tensors=(*others, *roles),
        dense_tensors=spec.layer_tensors if experts.n_dense else (),
        keys=keys,
    )


def of_config(config: Mapping[str, Any], fields: Mapping[str, str], **fixed: Any) -> Experts:
    """fields: name in Experts -> in the config, which has all but those in `fixed`."""
    numbers: dict[str, Any] = {}
    for name, of in fields.items():
        if name == "scale":
            numbers[name] = limits.number("config.json", of, config.get(of, 1.0), *limits.SCALE)
        elif name == "is_normed":
            numbers[name] = bool(config.get(of, True))
        else:
            high = {"n_expert": 4096, "n_used": 4096}.get(name, 1 << 22)
            low = {"n_expert": 2, "n_used": 1, "width": 1}.get(name, 0)
            numbers[name] = int(limits.number("config.json", of, config[of], low, high))
    return Experts(**{**numbers, **fixed})


def groups(config: Mapping[str, Any], experts: Experts) -> dict[str, Any]:
    """Stock keys of groups of experts, of which a token has the best ones; none where it has all."""
    n_expert, is_softmax = experts.n_expert, experts.scores == "softmax"
    n_groups, n_chosen = (int(config.get(name) or 1) for name in ("n_group", "topk_group"))
    if config.get("topk_method") == "greedy" or n_groups == n_chosen:
        return {}
    if not 1 <= n_chosen < n_groups or n_expert % n_groups or n_expert < 2 * n_groups:
        wanted = f"n_group that divides {n_expert} experts, and a topk_group below it"
        raise ConvertError("config.json", wanted, f"{n_groups} and {n_chosen}")
    if is_softmax:
        warn_of_readers("groups of experts by the sum of their two best, for stock readers", "by their best")
    return {"expert_group_count": n_groups, "expert_group_used_count": n_chosen}


def groups_of_stock(stock: Stock) -> dict[str, int]:
    """The config's fields of groups."""
    return {
        "n_group": stock.whole("expert_group_count", 0, 4096, 1),
        "topk_group": stock.whole("expert_group_used_count", 0, 4096, 1),
    }


def of_stock(stock: Stock, fields: Mapping[str, str]) -> dict[str, Any]:
    """The config's fields of a GGUF."""
    width = stock.whole("expert_feed_forward_length", 1, 1 << 22)
    shared = stock.values.get("expert_shared_feed_forward_length")
    n_shared = stock.whole("expert_shared_count", 0, 256, 1 if shared else 0)
    found = {
        "n_expert": stock.whole("expert_count", 2, 4096),
        "n_used": stock.whole("expert_used_count", 1, 4096),
        "width": width,
        "shared": stock.whole("expert_shared_feed_forward_length", 0, 1 << 22, n_shared * width),
        # where a config says it, stock readers take an absent key for false
        "is_normed": bool(stock.values.get("expert_weights_norm", "is_normed" not in fields)),
        "scale": stock.number("expert_weights_scale", 0, limits.SCALE[1], 0.0) or 1.0,
        "n_dense": stock.whole("leading_dense_block_count", 0, 4096, 0),
    }
    for name, usual in (("is_normed", True), ("scale", 1.0), ("n_dense", 0), ("shared", 0)):
        if name not in fields and found[name] != usual:
            raise ConvertError(stock.where, f"routed experts with {name} {usual}", str(found[name]))
    return {of: found[name] for name, of in fields.items()}


def shared_of_several(config: Mapping[str, Any], spec: ModelSpec) -> ModelSpec:
    """With experts as DeepSeek's configs describe them: the shared one is as wide as n_shared_experts."""
    experts = of_config(config, SEVERAL)
    n_shared = int(
        limits.number("config.json", "n_shared_experts", config.get("n_shared_experts") or 0, 0, 256)
    )
    spec = with_experts(spec, replace(experts, shared=n_shared * experts.width), Names())
    return replace(spec, keys={**spec.keys, "expert_shared_count": n_shared})


def several_of_stock(stock: Stock) -> dict[str, Any]:
    """The same config's fields of a GGUF."""
    found = of_stock(stock, {**SEVERAL, "shared": "shared"})
    return found | {"n_shared_experts": found.pop("shared") // found["moe_intermediate_size"]}


def gating_of(stock: Stock, usual: str) -> str:
    """softmax or sigmoid: how a GGUF's router makes scores. usual: where it does not say."""
    number = stock.whole("expert_gating_func", 0, 2, 0) or GATING[usual]
    return next(name for name, other in GATING.items() if other == number)


def require_sigmoid(stock: Stock) -> None:
    """Raises:
    ConvertError: a GGUF whose scores are others.
    """
    if (gating := gating_of(stock, "sigmoid")) != "sigmoid":
        raise ConvertError(stock.where, "expert_gating_func 2 (sigmoid)", f"{GATING[gating]} ({gating})")


def dense_layers(kinds: Sequence[str]) -> int:
    """How many layers are without experts; all before those with them."""
    n_dense = list(kinds).count("dense")
    if list(kinds) != ["dense"] * n_dense + ["sparse"] * (len(kinds) - n_dense):
        raise ConvertError("config.json", "layers without experts before all that have them", "others")
    return n_dense
