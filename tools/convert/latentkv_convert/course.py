"""The stages of a conversion in the words that people read, and what each is expected to cost."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .compute.arithmetic import multiplies_bf16
from .recipe import Recipe
from .source.source import Source

READ = "reading the text"
MEASURE = "measuring keys and values"
WEIGH = "measuring what the answer depends on"
CHOOSE = "choosing ranks and bits"
CHECK = "checking the choice"
TRAIN = "training"
POLISH = "polishing"
WRITE = "writing"

# Windows that a plan is run on, in windows of the statistics. Before it is corrected, Qwen2.5-Coder-1.5B at
# 8.5 % of f16 loses 0.024 nats in windows of 2048 tokens and 0.042 in those of 4096.
DEEP = 2
ROUGHLY = 2  # windows that a plan is checked on first
SHARED = 4  # windows whose loss is divided among the segments of a plan

# Seconds of two cores of an AMD EPYC of 2024. On other machines all of them are longer or shorter together.
_PRODUCT = {True: 0.7e12, False: 0.35e12}  # operations a second: of bf16, of f32
_SCORE, _SCORE_BACK = 1e-9, 3.5e-9  # a query and a key of one head, in either direction
_ENTRY = 2.5e-9  # of the vocabulary, for every token whose next one is drawn
_BYTES = 3e8  # read or written a second


def steps(
    recipe: Recipe, source: Source, needs: Sequence[str], n_checked: int = 0, n_choices: int = 1
) -> list[tuple[str, float]]:
    """In the order in which they come. needs: statistics. n_checked: windows that a plan is checked on, the
    first of them before the others. n_choices: plans that are compared."""
    spec, window = source.spec, min(recipe.calib_window, source.spec.n_ctx)
    reduced = multiplies_bf16(recipe.device)
    n_attending = len(spec.attention_layers)
    weights = n_weights(source)
    scores = n_attending * spec.n_head * window
    up = 2 * weights / _PRODUCT[reduced] + _SCORE * scores
    entries, in_f32 = (
        spec.n_vocab * (2 * spec.n_embd / _PRODUCT[as_bf16] + _ENTRY) for as_bf16 in (reduced, False)
    )
    back = 2 * 2 * weights / _PRODUCT[reduced] + _SCORE_BACK * scores + entries
    check = 2 * weights / _PRODUCT[False] + 1.5 * _SCORE * DEEP * scores
    deep = deep_window(window, spec.n_ctx)
    a_run = deep * (2 * check + in_f32)  # by two models, which both predict every other token
    read = 1.0 + weights / _BYTES
    found = [(READ, read)] if needs else []
    for name in needs:
        with_gradients = name in ("copies", "fisher")
        n_tokens = recipe.fisher_tokens if with_gradients else recipe.calib_tokens
        found.append((MEASURE, n_tokens * up))
        if with_gradients:
            found.append((WEIGH, n_tokens * back))
    choose = 1.0 + 2 * sum((spec.at(layer).kv_width / 512) ** 2 for layer in spec.attention_layers)
    if n_checked:
        found.append((CHOOSE, a_run))
    found += [(CHOOSE, choose)] * n_choices
    if n_checked:
        first = min(n_checked, ROUGHLY)
        back_too = min(SHARED * window, recipe.fisher_tokens) * (3 * check + _SCORE_BACK * scores + entries)
        times = (first * a_run, back_too, first * a_run, (n_checked - first) * a_run)
        found += [(CHECK, seconds) for seconds in times if seconds]
    if polish := recipe.options.get("polish"):
        found.append((POLISH, 4 * window * polish * (4 * up + _SCORE_BACK * scores + entries)))
        found.append((CHECK, n_checked * a_run))
    if recipe.finetune is not None:
        found.append((TRAIN, recipe.finetune.steps * 2048 * 3 * up))
    return [*found, (WRITE, 1.0 + weights / _BYTES)]


def deep_window(window: int, n_ctx: int) -> int:
    """Tokens of the windows that a plan is run on. Past half of its context a model may never have read
    (models/demo has not), and what is lost there says nothing."""
    return max(window, min(DEEP * window, n_ctx // 2))


def n_weights(source: Source) -> int:
    """That a token meets in all layers."""
    return sum(_layer_weights(source, kind) * n for kind, n in _kinds(source))


def _kinds(source: Source) -> list[tuple[int, int]]:
    """A layer that attends and one that does not, where there are such, and how many there are of each."""
    spec = source.spec
    attending = spec.attention_layers
    others = [layer for layer in range(spec.n_layer) if not spec.attends(layer)]
    return [(layers[0], len(layers)) for layers in (attending, others) if layers]


def _layer_weights(source: Source, layer: int) -> int:
    """That a token meets in a layer."""
    spec = source.spec
    total = 2 * spec.at(layer).kv_width * spec.n_embd if spec.attends(layer) else 0
    for role in spec.tensors_of(layer):
        n = math.prod(source.shape(role.target, layer))
        if role.target.partition(".")[0].endswith("_exps"):
            n = n * int(spec.keys["expert_used_count"]) // int(spec.keys["expert_count"])
        total += n
    return total
