"""How fast this machine is, by about a second of what a conversion does most, at the model's shapes."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ..compute import crew
from ..compute.arithmetic import model_arithmetic, multiplies_bf16
from ..course import Speed
from ..source.source import Source
from . import head
from .decoder import FFN_TOKENS
from .two_copies import TwoCopies

_SECONDS = 0.15  # of each measurement, at least one step
_LONGEST = 2048  # tokens of a window
_ROWS = 64  # of logits


def measured(source: Source, window: int, device: str) -> Speed:
    """All cores at once, each at its own numbers, as windows of a text are computed."""
    spec, reduced = source.spec, multiplies_bf16(device)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    rows, weight = drawn(FFN_TOKENS, spec.n_embd), drawn(max(spec.n_embd, 1024), spec.n_embd)
    n, repeats, width = min(window, _LONGEST), spec.n_head // spec.n_kv, spec.head_dim
    query, key, value = (drawn(1, heads, n, width) for heads in (repeats, 1, 1))
    logits = drawn(_ROWS, spec.n_vocab)

    def product(as_bf16: bool) -> None:
        if as_bf16:
            torch.nn.functional.linear(rows.bfloat16(), weight.bfloat16()).float()
        else:
            torch.nn.functional.linear(rows, weight)

    def attend(back: bool) -> None:
        own = [x.clone().requires_grad_(back) for x in (query, key, value)]
        with TwoCopies(1, 0, n // 8, None if back else (key, value)), torch.set_grad_enabled(back):
            q, k, v = own
            output = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )
        if back:
            torch.autograd.grad(output, own, output.detach())

    def draw() -> None:
        head.drawn(logits, torch.Generator().manual_seed(0))

    operations, scores = 2.0 * FFN_TOKENS * weight.numel(), float(repeats) * n * n
    with model_arithmetic(device, reduced), torch.no_grad():
        in_f32 = operations / _seconds(lambda: product(False), device)
        in_bf16 = operations / _seconds(lambda: product(True), device) if reduced else in_f32
        forward = _seconds(lambda: attend(False), device) / scores
        both = _seconds(lambda: attend(True), device) / scores
        entry = _seconds(draw, device) / logits.numel()
    return Speed({True: in_bf16, False: in_f32}, forward, both, entry, _read(source))


def _seconds(step: Callable[[], None], device: str) -> float:
    """Of one step, while all cores take such steps."""

    def repeated(at: int) -> tuple[int, float]:
        step()
        begin, n = time.monotonic(), 0
        while not n or time.monotonic() - begin < _SECONDS:
            step()
            n += 1
        return n, time.monotonic() - begin

    n_tasks = min(torch.get_num_threads(), crew.MOST)
    return 1 / sum(n / spent for n, spent in crew.each(repeated, n_tasks, device))


def _read(source: Source) -> float:
    """Seconds to make one number of a stored weight."""
    layer = source.spec.attention_layers[0]
    for _ in range(2):  # the first reads it from the disk
        begin = time.monotonic()
        found = source.tensor("attn_output.weight", layer)
    return (time.monotonic() - begin) / found.size
