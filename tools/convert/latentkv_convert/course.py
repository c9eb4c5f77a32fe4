"""The stages of a conversion in the words that people read, and what each is expected to cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
# How many of the windows that a plan is checked on say what exact tokens cost, and which of two plans loses
# less. Rounding alone costs much the same everywhere: all rows of SmolLM2-135M in q8_0 2.3e-4 nats, with a
# standard error of 2 % over four windows.
PRICED = 1
SHARED = 4  # windows whose loss is divided among the segments of a plan

_CORES = 2  # of the machine that the default speed is of


@dataclass(frozen=True)
class Speed:
    """Of a machine with all its cores; as it stands, of two cores of an AMD EPYC of 2024."""

    product: Mapping[bool, float] = field(default_factory=lambda: {True: 0.7e12, False: 0.35e12})
    # operations a second: of bf16, of f32
    score: float = 1e-9  # seconds for a query and a key of one head that has two copies of tokens
    score_back: float = 4.5e-9  # for both directions
    entry: float = 2.5e-9  # of the vocabulary, for every token whose next one is drawn
    number: float = 3e-9  # of a weight that is read

    def of(self, operations: float, reduced: bool = False) -> float:
        return operations / self.product[reduced]


Steps = list[tuple[str, float]]


def steps(
    recipe: Recipe,
    source: Source,
    needs: Sequence[str],
    n_checked: int = 0,
    n_choices: int = 1,
    machine: Speed | None = None,
) -> Steps:
    """In the order in which they come. needs: statistics. n_checked: windows that a plan is checked on, the
    first of them before the others. n_choices: plans that are compared."""
    spec, window, machine = source.spec, min(recipe.calib_window, source.spec.n_ctx), machine or Speed()
    reduced = multiplies_bf16(recipe.device)
    weights = n_weights(source)
    scores = len(spec.attention_layers) * spec.n_head * window  # of one token, if it read the whole window
    read = machine.number * weights / _CORES  # beside what is computed
    up = machine.of(2 * weights, reduced) + machine.score * scores
    entries = {kind: machine.of(2 * spec.n_embd * spec.n_vocab, kind) for kind in (True, False)}
    drawn = machine.entry * spec.n_vocab
    back = machine.of(3.5 * weights, reduced) + machine.score_back * scores + entries[reduced] + drawn
    deep = deep_window(window, spec.n_ctx)
    exact = deep * (machine.of(2 * weights) + machine.score * scores * deep / window) + read
    cached = 1.2 * exact + deep * (entries[False] + drawn / 2)  # both predict every other token
    found = [(READ, 1.0 + read)] if needs else []
    for name in needs:
        with_gradients = name in ("copies", "fisher")
        n_tokens = recipe.fisher_tokens if with_gradients else recipe.calib_tokens
        found.append((MEASURE, n_tokens * up + read))
        if with_gradients:
            found.append((WEIGH, n_tokens * back + read))
    choose = 0.2 + 0.5 * sum((spec.at(layer).kv_width / 512) ** 2 for layer in spec.attention_layers)
    if n_checked:
        found.append((CHOOSE, PRICED * (exact + cached)))
    found += [(CHOOSE, choose * Speed().product[False] / machine.product[False])] * n_choices
    if n_checked:
        shared = min(SHARED * window, recipe.fisher_tokens)
        down = machine.of(3.5 * weights) + 1.2 * machine.score_back * scores * deep / window
        run = (exact + 1.2 * exact) / deep + down + 1.5 * (2 * entries[False] + drawn)
        found += [
            (CHECK, PRICED * cached),
            (CHECK, shared * run + read),
            (CHECK, PRICED * cached),
            (CHECK, max(n_checked - PRICED, 0) * (exact + cached)),
        ]
    if polish := recipe.options.get("polish"):
        found.append((POLISH, 4 * window * polish * (4 * up + machine.score_back * scores + entries[False])))
        found.append((CHECK, n_checked * cached))
    if recipe.finetune is not None:
        found.append((TRAIN, recipe.finetune.steps * 2048 * 3 * up))
    return [each for each in [*found, (WRITE, 1.0 + machine.number * weights)] if each[1]]


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
