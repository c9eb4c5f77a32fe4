"""What a layer that does not attend has: shapes of its tensors, and that they are there."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import ConvertError
from ..ir import ModelSpec


def shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Role -> shape, of the tensors of a gated delta net."""
    n_k, n_v, width, inner, kernel = (
        int(spec.keys[f"ssm.{name}"])
        for name in ("group_count", "time_step_rank", "state_size", "inner_size", "conv_kernel")
    )
    channels = 2 * n_k * width + inner
    rows = {"attn_qkv": channels, "attn_gate": inner, "ssm_ba": 2 * n_v, "ssm_beta": n_v, "ssm_alpha": n_v}
    return {
        **{f"{stem}.weight": (n, spec.n_embd) for stem, n in rows.items()},
        "ssm_conv1d.weight": (channels, kernel),
        "ssm_dt.bias": (n_v,),
        "ssm_a": (n_v,),
        "ssm_norm.weight": (width,),
        "ssm_out.weight": (spec.n_embd, inner),
    }


def check_pattern(spec: ModelSpec, where: str, has: Callable[[str, int], bool]) -> None:
    """has(role, layer): whether the tensor is there.

    Raises:
        ConvertError: a layer has tensors of the other kind.
    """
    if spec.block.mixers is None:
        return
    own = {True: "attn_q.weight", False: "ssm_out.weight"}
    kinds = {True: "attention", False: "a delta net"}
    for layer in range(spec.n_layer):
        attends = spec.attends(layer)
        if not has(own[attends], layer):
            expected = f"{kinds[attends]} in layer {layer}, as the pattern of layers says"
            raise ConvertError(where, expected, f"no tensor {own[attends]}")
