"""load -> calibrate -> decompose -> allocate -> truncate -> rotate -> write."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from latentkv.console.progress import stage
from latentkv.console.whole import Whole

from . import calibrate, course, files, report
from .arithmetic import host_threads
from .errors import ConvertError, Interrupted, warn
from .fuse.finish import finished
from .ir import OF_VALUE, SIDES, Master, Plan, TensorRole
from .plan import methods, unmeasured
from .recipe import Recipe
from .schema import KEYS, VERSION
from .source.open_source import open_source
from .source.source import Source
from .weights import mixes
from .weights.encoding import Encoding
from .weights.out_tensor import OutTensor
from .weights.quantize import FILE_TYPES
from .work import Work
from .write import full_bytes, gguf_write, packed, paths, sidecar
from .write.check import check_heads, check_linear, check_plan

if TYPE_CHECKING:
    from .calibrate.sample import Sample
    from .calibrate.store import Layers
    from .recover.factored import Trained
    from .recover.lora import Recovery


FILE_TYPE = "general.file_type"


def convert(recipe: Recipe) -> report.Report:
    """Converts a checkpoint or a GGUF and writes OUT.gguf, OUT.report.json and OUT.ranks.png.

    Raises:
        ConvertError: any input that does not fit; no file is left unless it is complete.
    """
    files.check(recipe)
    if recipe.draws:
        report.check_plot()
    with host_threads(recipe.device):
        return _converted(recipe)


def _converted(recipe: Recipe) -> report.Report:
    source = open_source(recipe.source, recipe.pre)
    base = sidecar.base_keys(recipe) if recipe.sidecar else None
    spec, outtype = source.spec, recipe.outtype or source.outtype
    if recipe.method != "none":
        check_linear(spec, recipe.method)
    module = methods.module(recipe.method)
    check_heads(spec, recipe.method, getattr(module, "UNEQUAL_HEADS", False))
    method = module.create(recipe.options, spec)
    keys = model_keys(recipe, source, outtype)
    important = measures_importance(recipe, outtype)
    unmeasured.warn_of_budget(recipe, spec)
    needs = method.needs or (("activations",) if important else ())
    n_choices = len(getattr(method, "groupings", ("one",)))
    steps = course.steps(recipe, source, needs, getattr(method, "n_checked", 0), n_choices)
    with Whole(steps) as whole:
        whole.begin(course.READ if needs else course.CHOOSE)
        stats, sample = calibrate.collect(method.needs, recipe, source, important)
        return _planned(recipe, source, method, keys, base, outtype, stats, sample)


def _planned(
    recipe: Recipe,
    source: Source,
    method: Any,
    keys: dict[str, Any],
    base: Any,
    outtype: str,
    stats: dict[str, Layers],
    sample: Sample | None,
) -> report.Report:
    """What is left to do with statistics, and what is said where that is interrupted."""
    try:
        return _written(recipe, source, method, keys, base, outtype, stats, sample)
    except KeyboardInterrupt:
        if not stats or not recipe.cache:
            raise
        raise Interrupted("the calibration is kept: the same command goes on from there") from None


def _written(
    recipe: Recipe,
    source: Source,
    method: Any,
    keys: dict[str, Any],
    base: Any,
    outtype: str,
    stats: dict[str, Layers],
    sample: Sample | None,
) -> report.Report:
    """The plan and the files, from statistics."""
    spec = source.spec
    encoding = Encoding.of(
        spec, outtype, recipe.factor_type, recipe.outtype is None, stats.pop("activations", None)
    )
    work = Work(
        source,
        stats,
        recipe.seed,
        method.decompose,
        sample,
        recipe.device,
        recipe.rotate,
        recipe.center,
        encoding,
        recipe.finetune is not None,
        n_checked=getattr(method, "n_checked", 0),
    )
    plan = methods.planned(method, work)
    check_plan(plan, spec)
    trained, recovery = finetuned(recipe, work, plan)
    keys |= cache_keys(plan, work)
    if sample is not None:
        keys[KEYS["calibration_hash"]] = sample.digest
        keys[KEYS["calibration_tokens"]] = int(sample.tokens.size)
    others = model_tensors(source)
    tensors = [encoding.settled(each) for each in (*others, *cache_tensors(recipe, work, plan, trained))]
    full = full_bytes.total(source, encoding, others)
    added = sum(map(encoding.n_bytes, tensors)) - full
    if not plan.is_full:
        keys[KEYS["full_bytes"]] = full
    if base is not None:
        keys, tensors = sidecar.keys(base, keys), sidecar.tensors(source, tensors, encoding)
    with stage(len(tensors), course.WRITE, "tensor") as bar:
        size = gguf_write.write(
            recipe.output, spec.gguf_arch, keys, tensors, encoding, lambda tensor: bar.update(1)
        )
    n_tokens = 0 if sample is None else int(sample.tokens.size)
    return report.finish(recipe, work, plan, size, added, n_tokens, recovery)


def measures_importance(recipe: Recipe, outtype: str) -> bool:
    """Whether K-quants are searched for with an importance matrix of the calibration text.

    Raises:
        ConvertError: --imatrix or --no-imatrix where it would change nothing.
    """
    if outtype not in mixes.BASE:
        if recipe.imatrix is not None:
            option = "--imatrix" if recipe.imatrix else "--no-imatrix"
            raise ConvertError(option, f"--outtype {', '.join(mixes.BASE)} beside it", f"--outtype {outtype}")
        return False
    if recipe.imatrix is not False and recipe.calib is None:
        if recipe.imatrix:
            raise ConvertError("--imatrix", "a text to measure it on, --calib FILE", "none")
        warn("--calib", f"a text for the importance matrix of {outtype}", "none", "quantized without one")
    return recipe.imatrix is not False and recipe.calib is not None


def model_keys(recipe: Recipe, source: Source, outtype: str) -> dict[str, Any]:
    """general.*, the architecture's own keys, the vocabulary and latentkv.block.*."""
    keys = dict(source.keys())
    if recipe.outtype is not None or FILE_TYPE not in keys:
        keys[FILE_TYPE] = FILE_TYPES[outtype]
    keys |= {
        KEYS["version"]: VERSION,
        KEYS["source_method"]: recipe.method,
        KEYS["source_recipe"]: recipe.text(),
    }
    keys |= {KEYS[f"block_{name}"]: value for name, value in source.spec.block.said().items()}
    return keys | {KEYS[name]: value for name, value in source.spec.latentkv_keys.items()}


def cache_keys(plan: Plan, work: Work) -> dict[str, Any]:
    """latentkv.k.*, latentkv.v.* and the regions; nothing for a plan that is full everywhere."""
    keys = region_keys(plan)
    if plan.is_full:
        return keys
    for side in SIDES:
        layers = [layer.side(side) for layer in plan.layers]
        keys[KEYS[f"{side}_path"]] = [layer.path for layer in layers]
        keys[KEYS[f"{side}_group"]] = [layer.group for layer in layers]
        shapes = [work.spec.at(layer) for layer in range(work.spec.n_layer)]
        ranks = [
            layer.ranks or (own.head_dim,) * (0 if layer == OF_VALUE else own.n_kv)
            for layer, own in zip(layers, shapes, strict=True)
        ]
        keys[KEYS[f"{side}_ranks"]] = [rank for layer in ranks for rank in layer]
        segments = [
            layer.segments or ((own.head_dim,),) * (0 if layer == OF_VALUE else own.n_kv)
            for layer, own in zip(layers, shapes, strict=True)
        ]
        if any(len(widths) > 1 for layer in segments for widths in layer):
            keys[KEYS[f"{side}_segment_counts"]] = [len(widths) for layer in segments for widths in layer]
            keys[KEYS[f"{side}_segment_widths"]] = [
                w for layer in segments for widths in layer for w in widths
            ]
        if any(layer.formats for layer in layers):
            formats = [
                layer.formats or tuple(("f16",) * len(widths) for widths in group)
                for layer, group in zip(layers, segments, strict=True)
            ]
            keys[KEYS[f"{side}_segment_formats"]] = [f for layer in formats for group in layer for f in group]
        energy = [report.energy(work, plan, layer, side) for layer in range(work.spec.n_layer)]
        keys[KEYS[f"{side}_energy"]] = np.array(energy, dtype=np.float32)
    keys[KEYS["prefill"]] = plan.prefill
    if plan.fitted_context is not None:
        keys[KEYS["fitted_context"]] = plan.fitted_context
    if plan.forecast is not None:
        keys[KEYS["predicted_kld"]] = plan.forecast.kld
    return keys if plan.master is None else keys | master_keys(plan.master)


def master_keys(master: Master) -> dict[str, Any]:
    """latentkv.budget.* and the distortions of segments."""
    arrays = {f"{side}_segment_distortions": master.distortions[side].ravel() for side in SIDES}
    arrays |= {"budget_predicted": master.predicted, "budget_kld": master.kld}
    arrays["budget_exact_kld"] = np.array(list(master.exact.values()))
    return {
        KEYS["budget_formats"]: list(master.formats),
        KEYS["budget_context"]: master.context,
        KEYS["budget_drop_penalty"]: master.drop_penalty,
        KEYS["budget_exact_formats"]: list(master.exact),
        **{KEYS[name]: array.astype(np.float32) for name, array in arrays.items()},
    }


def region_keys(plan: Plan) -> dict[str, Any]:
    """latentkv.regions.*, what differs from the defaults."""
    keys: dict[str, Any] = {}
    if plan.sink or plan.recent:
        keys |= {KEYS["sink"]: plan.sink, KEYS["recent"]: plan.recent}
    if plan.recent_ratio:
        keys[KEYS["recent_ratio"]] = plan.recent_ratio
    for name, chosen in (("sink_format", plan.sink_format), ("recent_format", plan.recent_format)):
        if chosen != "f16":
            keys[KEYS[name]] = chosen
    return keys


def model_tensors(source: Source) -> list[OutTensor]:
    """Everything but K and V."""
    spec = source.spec
    tensors = [copied(source, role, None) for role in spec.global_tensors]
    for layer in range(spec.n_layer):
        tensors += [copied(source, role, layer) for role in spec.tensors_of(layer)]
    for name, array in spec.extra_tensors.items():
        tensors.append(OutTensor(name, array.shape, "vector", partial(np.asarray, array)))
    return tensors


def copied(source: Source, role: TensorRole, layer: int | None) -> OutTensor:
    """In the file's RoPE row order."""
    spec = source.spec if layer is None else source.spec.at(layer)
    rows = paths.head_rows(spec, role.rope_heads) if role.rope_heads else None

    def load() -> Any:
        array = source.tensor(role.target, layer)
        return array if rows is None else array[rows]

    name = role.target if layer is None else f"blk.{layer}.{role.target}"
    stored = source.stored(role.target, layer)
    return OutTensor(name, source.shape(role.target, layer), role.kind, load, stored)


def finetuned(recipe: Recipe, work: Work, plan: Plan) -> tuple[Trained, Recovery | None]:
    """Factors that training has changed, and what it was worth; none without --finetune."""
    if recipe.finetune is None:
        return {}, None
    from .recover import lora  # imports torch

    return lora.train(recipe, work, plan)


def cache_tensors(recipe: Recipe, work: Work, plan: Plan, trained: Trained) -> Sequence[OutTensor]:
    factors = lru_cache(maxsize=1)(
        lambda index, side: finished(
            work, plan.layers[index].side(side), index, side, trained.get((index, side))
        )
    )  # the factors of a side are written in a row
    tensors: list[OutTensor] = []
    for index, layer in enumerate(plan.layers):
        if packed.is_packed(work, layer):
            tensors += packed.together(work, index)
            continue
        if work.spec.packed_qkv:
            tensors += packed.query(work, index)
        for side in SIDES if not work.spec.at(index).shares_kv else ():
            chosen = layer.side(side)
            form = plan.form(work.spec.at(index), chosen)
            tensors += paths.tensors(
                paths.SideJob(work, index, side, chosen, form, partial(factors, index, side))
            )
    return tensors
