"""`--polish N`: the factors of a plan trained against the uncompressed model's own predictions.

A step reads BATCH windows of the calibration text at positions drawn from the served context, rows passing
through their real quantizers (straight through on the way back), exact tokens included, and lowers
KL(uncompressed ‖ compressed) of every token that reads compressed rows. Windows that nothing is fitted to, of
the text and of another one, say which of the factors on the way are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from latentkv.console.progress import stage

from ..calibrate.sample import cut, encode, read_texts
from ..compute.arithmetic import model_arithmetic
from ..course import POLISH
from ..errors import ConvertError, warn
from ..ir import SIDES, Plan, Polished
from ..plan.compressed import Compressed
from ..plan.forecast import Check, held_back
from ..recipe import Recipe
from ..work import Work
from .lora import rate
from .trained_rows import TrainedRows

BATCH = 4  # windows of a step
GUARD = 2  # windows of each text that factors are judged by
KNOWN = 64  # tokens by which a part of a longer window is known again
CHECKS = 8  # of the factors on the way, at most
STEP = 1.5e-5  # what a step that leads nowhere may cost, by the Fisher moments: a share of the plan's loss
BETAS = (0.9, 0.99)
Windows = NDArray[np.int64]


def polished(recipe: Recipe, work: Work, plan: Plan, n_checked: int) -> Plan:
    """The plan with the forecast of factors that are trained, which the work has then.

    Raises:
        ConvertError: a text with no windows but those that factors are judged by, or a loss that is not
            finite.
    """
    assert plan.forecast is not None
    windows, guards = texts(recipe, work, n_checked)
    seen = plan.forecast
    rows, found = train(work, plan, recipe.options["polish"], windows, guards)
    if not found.kept:
        warn("--polish", "factors that lose less", "none that did", "the plan's own are written")
        return replace(plan, polished=found)
    work.polished = {key: own.trained() for key, own in rows.items()}
    seen = Check(work, n_checked).measured(plan, seen.predicted)
    return replace(plan, forecast=seen, polished=found)


def texts(recipe: Recipe, work: Work, n_checked: int) -> tuple[Windows, list[Windows]]:
    """Windows to learn from; and those that factors are judged by: of the same text, and of the other kind
    that every machine has."""
    from ..calibrate.text import chats, mix

    assert work.sample is not None
    render = chats.renderer(work.source)
    own = read_texts(recipe.calib) if recipe.calib else mix.text(render)
    size = work.sample.tokens.shape[1]
    checked = held_back(work.sample, n_checked)
    spare = [window for window in work.sample.spare if not (window == checked).all(1).any()]
    guard = np.array(spare[-GUARD:]) if spare else checked[:GUARD]
    out, text = [window.tobytes() for window in (*checked, *guard)], encode(own, work.source)
    begins = slice(len(text.bos), len(text.bos) + KNOWN)
    found = [
        window for window in cut(text, size) if not any(window[begins].tobytes() in other for other in out)
    ]
    if not found or not len(guard):
        raise ConvertError("--polish", f"a text of several windows of {size} tokens", "one", "leave it out")
    others = cut(encode(mix.text(render, part=mix.CHECKED), work.source), size)
    return np.array(found), [guard, others[:: max(1, len(others) // GUARD)][:GUARD]]


def rows_of(work: Work, plan: Plan) -> dict[tuple[int, str], TrainedRows]:
    """What can be trained, by layer and side."""
    found = {}
    for index in work.spec.row_layers:
        for side in SIDES:
            chosen = plan.layers[index].side(side)
            if chosen.formats is not None and chosen.path not in ("full", "value"):
                found[index, side] = TrainedRows(work, chosen, index, side, plan.fitted_context)
    return found


def train(
    work: Work, plan: Plan, steps: int, windows: Windows, guards: Sequence[Windows]
) -> tuple[dict[tuple[int, str], TrainedRows], Polished]:
    """windows [n, window] to learn from; guards: of each text some that nothing was fitted to, the first of
    the same text."""
    rows = rows_of(work, plan)
    model = Compressed(work, plan, rows, windows[:1], repeats=True)
    parameters = [each for own in rows.values() for each in own.parameters]
    rng = np.random.default_rng([work.seed, steps])
    last = max(0, (plan.fitted_context or 0) - windows.shape[1])
    every = -(-steps // CHECKS)
    with model_arithmetic(work.device), stage(steps + 1 + CHECKS, POLISH, "step") as bar:
        guard = Guard(model, guards)
        before = guard.nats()
        optimizer = torch.optim.Adam(parameters, lr=peak(parameters, before[0]), betas=BETAS)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
        best, values = Polished(steps, 0, before, before), [each.detach().clone() for each in parameters]
        bar.update(1)
        for step, batch in zip(range(1, steps + 1), batches(windows, rng), strict=False):
            model.read(batch, int(rng.integers(0, last + 1)))
            exact, cached = model.up(keep=True)
            # The first tokens read few compressed rows.
            nats, above = model.divergence(exact, cached, slice(windows.shape[1] // 4, -1))
            if not math.isfinite(sum(nats)):
                raise ConvertError("--polish", "a finite loss", f"{nats[0]} at step {step}", "leave it out")
            model.down(above)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            bar.update(1)
            if step % every == 0 or step == steps:
                now = guard.nats()
                seen = Polished(steps, step, before, now)
                if seen.share < best.share and all(a <= b for a, b in zip(now, before, strict=True)):
                    best = seen
                    values = [each.detach().clone() for each in parameters]
                bar.note(f"{seen.share:.0%} of the loss")
                bar.update(1)
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
    return rows, best


class Guard:
    """Windows of each text that factors are judged by, over their second halves."""

    def __init__(self, model: Compressed, texts: Sequence[Windows]) -> None:
        self.model, self.texts = model, texts

    def nats(self) -> tuple[float, ...]:
        """Mean divergence of every text, nats per token."""
        found = []
        for windows in self.texts:
            self.model.read(windows)
            exact, cached = self.model.up(keep=False)
            nats, _ = self.model.divergence(exact, cached, slice(windows.shape[1] // 2, -1))
            found.append(float(np.mean(nats)))
        return tuple(found)


def batches(windows: Windows, rng: np.random.Generator) -> Iterator[Windows]:
    """Every window once before any twice."""
    order: list[int] = []
    size = min(BATCH, len(windows))
    while True:
        if len(order) < size:
            order += rng.permutation(len(windows)).tolist()
        yield windows[order[:size]]
        order = order[size:]


def peak(parameters: Sequence[Tensor], loss: float) -> float:
    """The learning rate. A number p costs ½ p² nats: all, moved by the rate, cost STEP of the loss."""
    n = sum(each.numel() for each in parameters)
    return math.sqrt(2 * STEP * max(loss, 1e-9) / max(n, 1))
