"""load -> calibrate -> decompose -> allocate -> truncate -> rotate -> write."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from latentkv.console.durations import duration
from latentkv.console.progress import stage
from latentkv.console.whole import Whole

from . import calibrate, course, files, pictures, report
from .compute.arithmetic import host_threads
from .errors import ConvertError
from .ir import ModelSpec, Plan
from .plan import forecast, methods, unmeasured
from .recipe import Recipe
from .source.open_source import open_source
from .source.source import Source
from .weights.encoding import Encoding
from .weights.mixes import measures_importance
from .work import Work
from .write import check, full_bytes, gguf_write, keys, mla, others, paths, sidecar

if TYPE_CHECKING:
    from .recover.factored import Trained
    from .recover.lora import Recovery


_WORTH = 60.0  # seconds of a conversion from which the machine is measured


def convert(recipe: Recipe) -> report.Report:
    """Converts a checkpoint or a GGUF and writes OUT.gguf, OUT.report.json and OUT.ranks.png.

    Raises:
        ConvertError: any input that does not fit; no file is left unless it is complete.
    """
    files.check(recipe)
    if recipe.draws:
        pictures.check_plot()
    with host_threads(recipe.device):
        return _converted(recipe)


def _converted(recipe: Recipe) -> report.Report:
    source = open_source(recipe.source, recipe.pre)
    base = sidecar.base_keys(recipe) if recipe.sidecar else None
    if recipe.sidecar and source.factors:
        raise ConvertError("--sidecar", "a GGUF whose weights have no factors", "NVFP4", "leave it out")
    spec, outtype = source.spec, recipe.outtype or source.outtype
    if source.note:
        print(source.note, file=sys.stderr)
    if recipe.method != "none":
        check.check_linear(spec, recipe.method)
    module = methods.module(recipe.method)
    check.check_heads(spec, recipe.method, getattr(module, "UNEQUAL_HEADS", False))
    check.check_training(spec, recipe)
    recipe = methods.resolved(recipe, spec)
    method = module.create(recipe.options, spec)
    own_keys = keys.of_model(recipe, source, outtype)
    important = measures_importance(recipe, outtype)
    unmeasured.warn_of_budget(recipe, spec)
    weighed = () if important else None
    encoding = Encoding.of(spec, outtype, recipe.factor_type, recipe.outtype is None, weighed)
    size = full_bytes.most(
        source,
        encoding,
        [] if recipe.sidecar else others.tensors(source),
        own_keys,
        0 if recipe.method == "none" else _widest(method, spec),
    )
    files.check_room(recipe, size)
    needs = method.needs or (("activations",) if important else ())
    n_choices = len(getattr(method, "groupings", ("one",)))
    n_checked = getattr(method, "n_checked", 0)
    if needs and recipe.device != "cpu":  # before a text is read for it
        from .calibrate.stream import torch_device  # imports torch

        torch_device(recipe.device)
    steps, is_known = _expected(recipe, source, needs, n_checked, n_choices)
    if is_known:
        whole_time = duration(sum(seconds for _, seconds in steps))
        print(f"this takes about {whole_time} on this machine, as fast as it was just now", file=sys.stderr)
    with Whole(steps, in_seconds=is_known) as whole:
        whole.begin(course.READ if needs else course.CHOOSE)
        stats, sample = calibrate.collect(method.needs, recipe, source, important, size)
        importance = stats.pop("activations", None)
        if n_checked and sample is not None:
            forecast.warn_of_one_window(sample)
        measured = bool(stats) or importance is not None
        with calibrate.trail(recipe, source, method.needs, sample, measured) as trail:
            work = Work(
                source,
                stats,
                recipe.seed,
                method.decompose,
                sample,
                recipe.device,
                recipe.rotate,
                recipe.center,
                replace(encoding, importance=importance),
                recipe.finetune is not None,
                trail=trail,
            )
            plan = methods.planned(method, work)
            check.check_plan(plan, spec)
            plan = _polished(recipe, work, plan, n_checked)
            work.kept.clear()
            trained, recovery = _finetuned(recipe, work, plan)
            size, added = _write(recipe, work, plan, trained, own_keys, base)
            return report.finish(recipe, work, plan, size, added, recovery)


def _expected(
    recipe: Recipe, source: Source, needs: Sequence[str], n_checked: int, n_choices: int
) -> tuple[course.Steps, bool]:
    """The stages with seconds, and whether these are of this machine: a conversion of less than a minute, or
    on a GPU, is not worth measuring it."""
    found = course.steps(recipe, source, needs, n_checked, n_choices)
    if recipe.device != "cpu" or not needs or sum(seconds for _, seconds in found) < _WORTH:
        return found, False
    from .calibrate import speed  # imports torch

    machine = speed.measured(source, min(recipe.calib_window, source.spec.n_ctx), recipe.device)
    return course.steps(recipe, source, needs, n_checked, n_choices, machine), True


def _widest(method: methods.Method, spec: ModelSpec) -> int:
    """KV heads that may share a latent."""
    groupings: Sequence[Mapping[str, int]] = getattr(method, "groupings", ())
    return max((group for each in groupings for group in each.values()), default=spec.n_kv)


def _polished(recipe: Recipe, work: Work, plan: Plan, n_checked: int) -> Plan:
    """The plan with another forecast, after --polish, whose factors are the work's then."""
    if not recipe.options.get("polish"):
        return plan
    from .recover import polish  # imports torch

    return polish.polished(recipe, work, plan, n_checked)


def _finetuned(recipe: Recipe, work: Work, plan: Plan) -> tuple[Trained, Recovery | None]:
    """Factors that training has changed, and what it was worth; none without --finetune."""
    if recipe.finetune is None:
        return {}, None
    from .recover import lora  # imports torch

    return lora.train(recipe, work, plan)


def _write(
    recipe: Recipe,
    work: Work,
    plan: Plan,
    trained: Trained,
    own_keys: Mapping[str, Any],
    base: Mapping[str, str] | None,
) -> tuple[int, int]:
    """Writes the file. Returns its bytes, and those beyond full K and V. base: keys of a sidecar's GGUF."""
    source, encoding = work.source, work.stored_as
    rest = others.tensors(source)
    replaced = mla.replaced(work, plan)
    kept = [each for each in rest if each.name not in replaced]
    tensors = [encoding.settled(each) for each in (*kept, *paths.tensors(work, plan, trained))]
    remade = {each.name for each in tensors if each.stored is None}  # with its factor, if it has one
    left_out = {factor for weight, factor in source.factors.items() if weight in remade}
    tensors = [each for each in tensors if each.name not in left_out]
    full = full_bytes.total(source, encoding, rest)
    added = sum(map(encoding.n_bytes, tensors)) - full
    entries = {**own_keys, **keys.of_cache(plan, work), **keys.of_sample(work.sample)}
    entries |= {} if plan.is_full else keys.of_size(full)
    if base is not None:
        entries, tensors = sidecar.keys(base, entries), sidecar.tensors(source, tensors, encoding)
    check.warn_of_widths(tensors, encoding)
    with stage(len(tensors), course.WRITE, "tensor") as bar:
        size = gguf_write.write(
            recipe.output, work.spec.gguf_arch, entries, tensors, encoding, lambda tensor: bar.update(1)
        )
    return size, added
