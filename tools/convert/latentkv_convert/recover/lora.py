"""LoRA recovery: adapters on the factors, trained on text by next-token loss, merged before they are written.

The compressed model runs whole in torch (factored.py) with everything frozen but the adapters, which peft
puts on A and, unless asked otherwise, on the up-projections (Palu: rank 32 on A, rate 2e-4, cosine; Eigen
Attention: both). Training ends before rotations are fused, as those must stay orthogonal. The last tenth of
the text is held back; perplexity there, before and after, is in the report.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from latentkv.console.progress import stage

from ..calibrate.decoder import Decoder
from ..calibrate.sample import Encoded, encode, read_text
from ..course import TRAIN
from ..errors import ConvertError, need
from ..ir import SIDES, ModelSpec, Plan
from ..recipe import Finetune, Recipe
from ..work import Work
from . import factored

WINDOW = 512  # tokens of a sequence
BATCH = 4  # sequences of a step
HELD_BACK = 16  # sequences at most, to measure perplexity on
WARM_UP = 0.05  # of the steps
ADAPTED = {"a": r".*\.latent_a", "ab": r".*\.(latent_a|latent_b\.\d+)"}


@dataclass(frozen=True)
class Recovery:
    """What the training did; perplexities on the held-back text."""

    steps: int
    training_tokens: int  # of the text, however often they were read
    held_back_tokens: int
    original: float
    before: float
    after: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def check(plan: Plan, spec: ModelSpec) -> None:
    """Refuses plans whose factors are not A and an up-projection.

    Raises:
        ConvertError: no latent at all, keys that are cached after RoPE or a norm over all heads, or columns
            that are not stored.
    """
    sides = [layer.side(side) for layer in plan.layers for side in SIDES]
    if plan.is_full:
        raise ConvertError("--finetune", "a method that makes latents", "full K and V everywhere")
    if spec.norms_whole("k") and any(layer.k.ranks for layer in plan.layers):
        got = "a norm over all heads of K after its projection"
        raise ConvertError("--finetune", "K whose latent is A x", got)
    if spec.block.value_norm and any(layer.v.ranks for layer in plan.layers):
        raise ConvertError("--finetune", "V whose latent is A x", "a norm of V after its projection")
    if any(side.path == "rotated" for side in sides):
        raise ConvertError("--finetune", "K rebuild or absorbed, whose latent is A x", "K rotated")
    if any(name == "none" for side in sides for group in side.formats or () for name in group):
        raise ConvertError("--finetune", "a plan that stores all its columns", "dropped segments")


def train(recipe: Recipe, work: Work, plan: Plan) -> tuple[factored.Trained, Recovery]:
    """The factors of every latent after training, full precision and not rotated; and what it was worth.

    Raises:
        ConvertError: a plan that cannot be trained, a text that is too short, or a loss that is not finite.
    """
    assert recipe.finetune is not None
    check(plan, work.spec)
    options, option = recipe.finetune, "--finetune"
    text = encode(read_text(options.text, option), work.source, option)
    training, held_back = split(text, min(WINDOW, work.spec.n_ctx))
    device = torch.device(recipe.device)
    model = Decoder(work.source).to(device)
    original = perplexity(model, held_back)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(recipe.seed)
        factors = factored.install(model, work, plan)
        model.to(device)
        before = perplexity(model, held_back)
        adapted = adapters(model, options)
        descend(adapted, training, options, np.random.default_rng(recipe.seed))
        merged = adapted.merge_and_unload()
    after = perplexity(merged, held_back)
    found = Recovery(options.steps, training.numel(), held_back.numel(), original, before, after)
    return {item: sides.trained() for item, sides in factors.items()}, found


def split(text: Encoded, window: int) -> tuple[Tensor, Tensor]:
    """[n, window] to train on and [m, window] held back: the last tenth, at most HELD_BACK windows.

    Raises:
        ConvertError: fewer than BATCH + 1 windows.
    """
    body = window - len(text.bos)
    count = len(text.ids) // body
    if count < BATCH + 1:
        least = f"a text of at least {(BATCH + 1) * body} tokens"
        raise ConvertError("--finetune", least, f"{len(text.ids)} tokens")
    rows: NDArray[np.int64] = text.ids[: count * body].reshape(count, body)
    windows = torch.from_numpy(np.hstack([np.tile(text.bos, (count, 1)), rows]))
    kept = max(1, min(HELD_BACK, count // 10))
    return windows[:-kept], windows[-kept:]


def adapters(model: Any, options: Finetune) -> Any:
    """The model with peft's adapters; alpha is the rank, so that they add with weight 1."""
    peft: Any = need("peft")
    config = peft.LoraConfig(
        r=options.lora_rank, lora_alpha=options.lora_rank, target_modules=ADAPTED[options.lora_on]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by an old name
        return peft.get_peft_model(model, config)


def descend(model: Any, training: Tensor, options: Finetune, rng: np.random.Generator) -> None:
    """AdamW with a short warm-up and a cosine to zero; every window once before any twice."""
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=options.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, options.steps))
    order: list[int] = []
    model.train()
    with stage(options.steps, TRAIN, "step") as bar:
        for step in range(options.steps):
            if len(order) < BATCH:
                order += rng.permutation(len(training)).tolist()
            batch, order = order[:BATCH], order[BATCH:]
            value = loss(model, training[batch])
            if not torch.isfinite(value):
                got = f"{float(value.detach())} at step {step}"
                raise ConvertError("--finetune", "a finite loss", got, "lower --lr")
            value.backward()
            shown = float(value.detach())
            nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            bar.note(f"loss {shown:.3f}")
            bar.update(1)
    model.eval()


def rate(step: int, steps: int) -> float:
    """Share of the learning rate: up over the first steps, then half a cosine."""
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def loss(model: Any, windows: Tensor) -> Tensor:
    """Mean next-token negative log-likelihood in nats."""
    tokens = windows.to(next(model.parameters()).device)
    logits = model(tokens)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def perplexity(model: Any, windows: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        return math.exp(sum(float(loss(model, window[None])) for window in windows) / len(windows))
