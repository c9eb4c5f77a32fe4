"""Checks before writing: what every reader would refuse (docs/gguf.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..errors import ConvertError, warn
from ..ir import OF_VALUE, SIDES, ModelSpec, Plan, SidePlan
from ..recipe import Recipe
from ..rows.sizes import has_group_scales, in_blocks
from ..schema import ENUMS, RANK_PAD
from ..weights.encoding import Encoding
from ..weights.mixes import BASE
from ..weights.tensor import BLOCK, OutTensor


def check_linear(spec: ModelSpec, method: str) -> None:
    """K and V are linear in the layer's input, so that factors of the weights can stand for them.

    Raises:
        ConvertError: the checkpoint clips them.
    """
    clip = spec.keys.get("attention.clamp_kqv")
    if clip:
        raise ConvertError(
            "--method", f"none: the checkpoint clips K and V to ±{clip:g}, which no latent can follow", method
        )


def check_heads(spec: ModelSpec, method: str, follows: bool) -> None:
    """follows: the method takes every layer as it is.

    Raises:
        ConvertError: it does not, and layers have K and V of different shapes.
    """
    if spec.mla is not None and not follows:
        wanted = "waterfill or none, as keys and values are one row (MLA)"
        raise ConvertError("--method", wanted, method)
    if spec.heads and not follows:
        shapes = sorted({(shape.n_kv, shape.head_dim) for shape in spec.heads})
        got = " and ".join(f"{n_kv} x {head_dim}" for n_kv, head_dim in shapes)
        of = f"KV heads differ between layers ({got})" if len(shapes) > 1 else "heads differ between layers"
        wanted = f"waterfill or none, as {of}"
        raise ConvertError("--method", wanted, method)


def check_training(spec: ModelSpec, recipe: Recipe) -> None:
    """Raises:
    ConvertError: --finetune of factors that stand in no projection's place.
    """
    if recipe.finetune is not None and spec.mla is not None:
        raise ConvertError("--finetune", "none for MLA, whose rows are no projection's output", "one")


def check_plan(plan: Plan, spec: ModelSpec) -> None:
    """Paths, groups, ranks, segments and formats of every layer.

    Raises:
        ConvertError: a reader would refuse the file.
    """
    if len(plan.layers) != spec.n_layer:
        raise ConvertError("plan", f"{spec.n_layer} layers", str(len(plan.layers)))
    if not 0 <= plan.recent_ratio <= 1:
        raise ConvertError("plan", "a recent_ratio from 0 to 1", f"{plan.recent_ratio:g}")
    for name in (plan.sink_format, plan.recent_format):
        known = [word for word in ENUMS["format"][1:] if not in_blocks(word)]
        if name not in known:
            raise ConvertError("plan", f"region formats of {', '.join(known)}", name)
    for index, layer in enumerate(plan.layers):
        for side in SIDES:
            _check_side(f"layer {index} {side}", side, layer.side(side), spec.at(index).of_side(side))
            _check_blocks(f"layer {index} {side}", side, layer.side(side), plan)


def _check_blocks(where: str, side: str, side_plan: SidePlan, plan: Plan) -> None:
    """Checks that only K has formats of token blocks, and that recent tokens exist, among which a block
    fills."""
    for name in (name for group in side_plan.formats or () for name in group if in_blocks(name)):
        if side == "v":
            raise ConvertError(where, "formats of single tokens for V", name)
        if plan.recent == 0 and plan.recent_ratio == 0:
            raise ConvertError("--recent", f"recent tokens beside {name}, whose blocks of 32 wait there", "0")


def _check_side(where: str, side: str, plan: SidePlan, spec: ModelSpec) -> None:
    paths = ENUMS[f"{side}_path"]
    if plan.path not in paths:
        raise ConvertError(where, f"a path of {', '.join(paths)}", plan.path)
    if spec.n_kv % plan.group:
        raise ConvertError(where, f"a group that divides {spec.n_kv} KV heads", str(plan.group))
    if plan == OF_VALUE:
        if side != "k" or not spec.value_of_key:
            raise ConvertError(where, "keys of V's rows where V is what the key projection makes", plan.path)
        return
    if plan.path == "full":
        if plan.formats is not None:
            _check_formats(where, plan.formats, ((spec.head_dim,),) * spec.n_kv)
        return
    full = plan.group * spec.head_dim
    n_groups = spec.n_kv // plan.group
    if len(plan.ranks) != n_groups or len(plan.segments) != n_groups:
        raise ConvertError(where, f"{n_groups} ranks", f"{plan.ranks} in segments {plan.segments}")
    for rank, widths in zip(plan.ranks, plan.segments, strict=True):
        if not 0 < rank <= full or (rank % RANK_PAD and rank != full):
            raise ConvertError(where, f"a rank up to {full} in steps of {RANK_PAD}", str(rank))
        if sum(widths) != rank or min(widths) < 1:
            raise ConvertError(where, f"segments that add up to {rank}", str(widths))
        if len(widths) > 1 and any(width % RANK_PAD for width in widths):
            raise ConvertError(where, f"segments in steps of {RANK_PAD}", str(widths))
    if plan.formats is not None:
        _check_formats(where, plan.formats, plan.segments)


def _check_formats(where: str, planned: Sequence[Sequence[str]], segments: Sequence[Sequence[int]]) -> None:
    for widths, formats in zip(segments, planned, strict=True):
        if len(formats) != len(widths) or any(name not in ENUMS["format"] for name in formats):
            raise ConvertError(where, f"{len(widths)} formats of {', '.join(ENUMS['format'])}", str(formats))
        stored = [name != "none" for name in formats]
        if stored != sorted(stored, reverse=True):
            raise ConvertError(where, "dropped segments after stored ones", str(formats))
    held = {name for names in planned for name in names if name != "none"}
    if len({has_group_scales((name,)) for name in held}) > 1:
        raise ConvertError(
            where, "formats n8 … n1 throughout a row, or none of them", ", ".join(sorted(held))
        )


def warn_of_widths(tensors: Sequence[OutTensor], encoding: Encoding) -> None:
    """Warns once if rows cannot be divided into the blocks of their type."""
    encoded = [t for t in tensors if t.stored is None and t.kind in ("weight", "table", "down")]
    outtype, types = encoding.outtype, {t.name: encoding.type_of(t) for t in encoded}
    if outtype in BASE:
        wide = [t for t in encoded if t.kind != "down" and t.shape[-1] % 256]
        wide, width = [t for t in wide if not t.name.startswith("position_embd")], 256
    else:
        asked = {t.name: encoding.factor_type if t.kind == "down" else outtype for t in encoded}
        wide = [t for t in encoded if t.kind != "table" and asked[t.name] != types[t.name]]
        width = BLOCK
    if wide:
        got = Counter(types[t.name] for t in wide)
        listed = ", ".join(f"{count} such tensors are {kind}" for kind, count in got.most_common())
        warn(wide[0].name, f"rows of a multiple of {width} for {outtype}", f"{wide[0].shape[-1]}", listed)
