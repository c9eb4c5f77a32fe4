"""load -> calibrate -> decompose -> allocate -> truncate -> rotate -> write."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from . import calibrate, files, progress, report
from .errors import ConvertError
from .ir import SIDES, Master, ModelSpec, Plan, TensorRole
from .plan import methods
from .plan.work import Work
from .recipe import Recipe
from .schema import KEYS, VERSION
from .source import archs, tokenizer
from .source.checkpoint import Checkpoint
from .write import gguf_write, packed, paths
from .write.check import check_linear, check_plan
from .write.fuse.finish import finished
from .write.gguf_write import OutTensor
from .write.quantize import FILE_TYPES

if TYPE_CHECKING:
    from .recover.factored import Trained
    from .recover.lora import Recovery


def convert(recipe: Recipe) -> report.Report:
    """Converts a checkpoint and writes OUT.gguf, OUT.report.json and OUT.ranks.png.

    Raises:
        ConvertError: any input that does not fit; no file is left unless it is complete.
    """
    files.check(recipe)
    if recipe.draws:
        report.check_plot()
    checkpoint = Checkpoint(recipe.checkpoint)
    spec = archs.model_spec(checkpoint.config)
    if recipe.method != "none":
        check_linear(spec, recipe.method)
    method = methods.module(recipe.method).create(recipe.options, spec)
    check_shapes(checkpoint, spec)
    vocabulary = tokenizer.keys(checkpoint.directory, checkpoint.config, spec.n_vocab, recipe.pre)
    stats, sample = calibrate.collect(method.needs, recipe, checkpoint, spec)
    work = Work(
        spec,
        checkpoint,
        stats,
        recipe.seed,
        method.decompose,
        sample,
        recipe.device,
        recipe.rotate,
        recipe.center,
        recipe.outtype,
        recipe.finetune is not None,
    )
    plan = methods.planned(method, work)
    check_plan(plan, spec)
    trained, recovery = finetuned(recipe, work, plan)
    keys = model_keys(recipe, spec) | vocabulary | cache_keys(plan, work)
    if sample is not None:
        keys[KEYS["calibration_hash"]] = sample.digest
        keys[KEYS["calibration_tokens"]] = int(sample.tokens.size)
    tensors = [*model_tensors(checkpoint, spec), *cache_tensors(recipe, work, plan, trained)]
    with progress.bar(len(tensors), "write", "tensor") as bar:
        size = gguf_write.write(
            recipe.output, spec.gguf_arch, keys, tensors, recipe.outtype, lambda tensor: bar.update(1)
        )
    n_tokens = 0 if sample is None else int(sample.tokens.size)
    return report.finish(recipe, work, plan, size, n_tokens, recovery)


def check_shapes(checkpoint: Checkpoint, spec: ModelSpec) -> None:
    """The K and V projections, the FFN, the embedding and a table of positions have the shapes the config
    promises."""
    expected = {spec.global_tensors[0].source: (spec.n_vocab, spec.n_embd)}
    for side in SIDES:
        projection = spec.projections[side]
        width = spec.kv_width if projection.rows is None else spec.q_width + 2 * spec.kv_width
        expected[f"{spec.layers}.0.{projection.module}.weight"] = (width, spec.n_embd)
    targets = {role.target: role for role in spec.layer_tensors}
    packed = spec.block.ffn == "gated" and "ffn_gate.weight" not in targets
    n_ff = spec.keys["feed_forward_length"] * (2 if packed else 1)
    expected[f"{spec.layers}.0.{targets['ffn_up.weight'].source}"] = (n_ff, spec.n_embd)
    for role in spec.global_tensors:
        if role.rows is not None and checkpoint.shape(role.source)[0] <= role.rows[-1]:
            got = f"{checkpoint.shape(role.source)[0]}"
            raise ConvertError(role.source, f"{role.rows[-1] + 1} rows from config.json", got)
    for name, shape in expected.items():
        if checkpoint.shape(name) != shape:
            raise ConvertError(
                name, f"shape {list(shape)} from config.json", f"{list(checkpoint.shape(name))}"
            )


def model_keys(recipe: Recipe, spec: ModelSpec) -> dict[str, Any]:
    """general.*, the architecture's own keys and latentkv.block.*."""
    keys: dict[str, Any] = {
        "general.type": "model",
        "general.name": recipe.checkpoint.resolve().name,
        "general.file_type": FILE_TYPES[recipe.outtype],
        "general.quantization_version": 2,
    }
    keys |= {f"{spec.gguf_arch}.{name}": value for name, value in spec.keys.items()}
    keys |= {
        KEYS["version"]: VERSION,
        KEYS["source_method"]: recipe.method,
        KEYS["source_recipe"]: recipe.text(),
    }
    keys |= {KEYS[f"block_{name}"]: value for name, value in dataclasses.asdict(spec.block).items()}
    return keys | {KEYS[name]: value for name, value in spec.latentkv_keys.items()}


def cache_keys(plan: Plan, work: Work) -> dict[str, Any]:
    """latentkv.k.*, latentkv.v.* and the regions; nothing for a plan that is full everywhere."""
    keys = region_keys(plan)
    if plan.is_full:
        return keys
    for side in SIDES:
        layers = [layer.side(side) for layer in plan.layers]
        keys[KEYS[f"{side}_path"]] = [layer.path for layer in layers]
        keys[KEYS[f"{side}_group"]] = [layer.group for layer in layers]
        n_kv, head_dim = work.spec.n_kv, work.spec.head_dim
        ranks = [layer.ranks or (head_dim,) * n_kv for layer in layers]
        keys[KEYS[f"{side}_ranks"]] = [rank for layer in ranks for rank in layer]
        segments = [layer.segments or ((head_dim,),) * n_kv for layer in layers]
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
    return {
        KEYS["budget_formats"]: list(master.formats),
        KEYS["budget_context"]: master.context,
        KEYS["budget_drop_penalty"]: master.drop_penalty,
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


def model_tensors(checkpoint: Checkpoint, spec: ModelSpec) -> list[OutTensor]:
    """Everything but K and V, in the file's RoPE row order."""
    tensors: list[OutTensor | None] = [_copy(checkpoint, spec, role, "", "") for role in spec.global_tensors]
    for layer in range(spec.n_layer):
        source, target = f"{spec.layers}.{layer}.", f"blk.{layer}."
        tensors += [_copy(checkpoint, spec, role, source, target) for role in spec.layer_tensors]
    for name, array in spec.extra_tensors.items():
        tensors.append(OutTensor(name, array.shape, "vector", partial(np.asarray, array)))
    return [tensor for tensor in tensors if tensor is not None]


def _copy(
    checkpoint: Checkpoint, spec: ModelSpec, role: TensorRole, source: str, target: str
) -> OutTensor | None:
    name = source + role.source
    if role.optional and name not in checkpoint:
        return None
    rows = paths.head_rows(spec, role.rope_heads) if role.rope_heads else None

    def load() -> Any:
        array = checkpoint.read(name)
        if role.rows is not None:
            array = array[role.rows]
        if rows is not None:
            array = array[rows]
        return array if role.transform is None else role.transform(array)

    shape = checkpoint.shape(name)
    if role.rows is not None:
        shape = (len(role.rows), *shape[1:])
    return OutTensor(target + role.target, shape, role.kind, load)


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
        for side in SIDES:
            chosen = layer.side(side)
            job = paths.SideJob(work, index, side, chosen, plan.form(chosen), partial(factors, index, side))
            tensors += paths.tensors(job)
    return tensors
