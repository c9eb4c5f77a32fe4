"""The cache's row formats in torch, to measure what a plan costs
(native/src/cache/formats/{affine,fit,normal}.h)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .sizes import has_group_scales

# Optimal step of a uniform quantizer with 2^b levels for a Gaussian of standard deviation 1 (Max 1960).
GAUSSIAN_STEP = {1: 1.5958, 2: 0.9957, 3: 0.5860, 4: 0.3352, 5: 0.1881, 6: 0.1041, 8: 0.0308}
# The same in n8 … n1, in seven bits.
NORMAL_STEP = {
    1: 102 / 64, 2: 1.0, 3: 75 / 128, 4: 86 / 256, 5: 96 / 512, 6: 107 / 1024, 8: 126 / 4096,
}  # fmt: skip
# And of the levels that are read: further apart by half of what least squares shrinks values
# (native/src/cache/formats/normal.h).
READ_STEP = NORMAL_STEP | {1: 2.0, 2: 68 / 64, 3: 76 / 128}
MAX_FITTED_BITS = 4
_N_REFINE = 3
SHARED = ((8, 6), (5, 4, 3), (2,), (1,))  # bits of the segments of a group that share a scale
SPANNED = 6  # bits from which a shared scale spans the segments' values; below, it is fitted
_N_SCALES = 2
_F16_MAX = 65504.0
_BYTE_MAX = 0xF7  # of a shared scale: the upper bits of a finite f16


def stored(x: Tensor, fmt: str) -> Tensor:
    """What a cache returns for rows x [..., width] f32 of segments in format f16, q8 … q1, q8_0 or none.

    qB: code · scale + minimum. Both are of least squared error up to 4 bits; above, or where the minimum
    dwarfs the step, they span the row.
    """
    if fmt == "none":
        return torch.zeros_like(x)
    if fmt == "f16":
        return _half(x).float()
    if fmt == "q8_0":
        return _grid(x.unflatten(-1, (-1, 32))).flatten(-2)
    bits = int(fmt[1:])
    n_steps = float(2**bits - 1)
    minimum = _rounded(x.amin(-1, keepdim=True), down=True)
    scale = _rounded((x.amax(-1, keepdim=True) - minimum).clamp_min(0) / n_steps, down=False)
    if bits <= MAX_FITTED_BITS:
        step, centre = fitted(x, bits)
        low = centre - n_steps / 2 * step
        fits = (low.abs() < 64 * step) & (step > 1e-6)
        minimum = torch.where(fits, _half(low).float(), minimum)
        scale = torch.where(fits, _half(step).float(), scale)
    return _codes(x - minimum, scale, n_steps).mul_(scale).add_(minimum)


Segments = Sequence[tuple[int, str]]  # channels and format


def stored_rows(x: Tensor, groups: Sequence[Segments]) -> Tensor:
    """What a cache returns for whole rows x [n, channels] f32 of groups."""
    widths = [sum(width for width, _ in segments) for segments in groups]
    pairs = zip(x.split(widths, dim=-1), groups, strict=True)
    return torch.cat([_stored_group(each, segments) for each, segments in pairs], -1)


def _stored_group(x: Tensor, segments: Segments) -> Tensor:
    pieces = x.split([width for width, _ in segments], dim=-1)
    parts = [(piece, fmt) for piece, (_, fmt) in zip(pieces, segments, strict=True)]
    if not has_group_scales(fmt for _, fmt in parts):
        return torch.cat([stored(piece, fmt) for piece, fmt in parts], -1)
    scales: dict[str, Tensor] = {}
    for shared in SHARED:
        own = [each for each in parts if each[1] != "none" and _bits(each[1]) in shared]
        if own:
            scale = spanning(own) if shared[0] >= SPANNED else least_squares(own)
            scales |= {fmt: scale for _, fmt in own}
    held = [
        levels(part, scales[fmt], fmt) * (scales[fmt] * gain(fmt))
        if fmt in scales
        else torch.zeros_like(part)
        for part, fmt in parts
    ]
    return torch.cat(held, -1)


def spanning(parts: Sequence[tuple[Tensor, str]]) -> Tensor:
    """[..., 1] the smallest scale at which no value is beyond the outermost level: among eight bits a clipped
    value costs more than all others (SmolLM2-135M at 28 % of f16: 0.0007 nats, not 0.0003)."""
    most = torch.cat([part.abs() / outermost(fmt) for part, fmt in parts], -1)
    return _byte(_rounded(most.amax(-1, keepdim=True), down=False), up=0x7F)


def least_squares(parts: Sequence[tuple[Tensor, str]]) -> Tensor:
    """[..., 1] the scale of least squared error: it starts as the root mean square, and twice follows from
    the nearest levels."""
    values = torch.cat([part for part, _ in parts], -1)
    scale = values.square().mean(-1, keepdim=True).sqrt()
    for _ in range(_N_SCALES):
        nearest = torch.cat([levels(part, scale, fmt) for part, fmt in parts], -1)
        xl, ll = (values * nearest).sum(-1, keepdim=True), nearest.square().sum(-1, keepdim=True)
        scale = torch.where((xl > 0) & (ll > 0), xl / torch.where(ll > 0, ll, 1.0), scale)
    return _byte(scale, up=0x40)


def levels(x: Tensor, scale: Tensor, fmt: str) -> Tensor:
    """The levels nearest to x / scale in n8 … n1: evenly apart, for a normal distribution of standard
    deviation 1."""
    step, most = NORMAL_STEP[_bits(fmt)], float(2 ** _bits(fmt) - 1)
    return _codes(x + outermost(fmt) * scale, step * scale, most).sub_(most / 2).mul_(step)


def gain(fmt: str) -> float:
    """How much further apart levels are read than they are fitted."""
    return READ_STEP[_bits(fmt)] / NORMAL_STEP[_bits(fmt)]


def is_spanned(fmt: str) -> bool:
    """Whether the scale that these segments share spans their values."""
    return _bits(fmt) >= SPANNED


def outermost(fmt: str) -> float:
    """Level of n8 … n1."""
    return NORMAL_STEP[_bits(fmt)] * (2 ** _bits(fmt) - 1) / 2


def _bits(fmt: str) -> int:
    return int(fmt[1:])


def _grid(x: Tensor) -> Tensor:
    """ggml's q8_0 of blocks x [..., 32]: whole multiples of the largest magnitude / 127."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    inverse = torch.where(scale > 1e-36, 1 / scale, 0.0)
    y = x * inverse
    return (y.abs() + 0.5).floor_().copysign_(y) * _half(scale).float()


def fitted(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scale and centre [..., 1] of least squared error for levels −z … z, z = (2^bits − 1) / 2.

    Levels and parameters alternate three times from each of two starts: what spans the row, and the optimal
    step for a Gaussian.
    """
    n, n_steps = x.shape[-1], float(2**bits - 1)
    z = n_steps / 2
    highest, mean = x.amax(-1, keepdim=True), x.mean(-1, keepdim=True)
    middle = (x.amin(-1, keepdim=True) + highest) / 2
    widest = (highest - middle) / z
    spread = (x - mean).square_().mean(-1, keepdim=True).sqrt() * GAUSSIAN_STEP[bits]
    best, best_centre, best_gain = widest, middle, torch.full_like(widest, -1.0)
    for scale, centre in ((widest, middle), (spread, mean)):
        for _ in range(_N_REFINE):
            y = x - centre
            level = _codes(y + z * scale, scale, n_steps).sub_(z)
            y_sum, l_sum = y.sum(-1, keepdim=True), level.sum(-1, keepdim=True)
            xl = y.mul_(level).sum(-1, keepdim=True) - l_sum * y_sum / n
            ll = level.square_().sum(-1, keepdim=True) - l_sum * l_sum / n
            good = (xl > 0) & (ll > 0)
            scale = torch.where(good, xl / torch.where(good, ll, 1.0), scale)
            centre = torch.where(good, centre + (y_sum - scale * l_sum) / n, centre)
            better = good & (xl * scale > best_gain) & (widest > 1e-12)
            best, best_centre = torch.where(better, scale, best), torch.where(better, centre, best_centre)
            best_gain = torch.where(better, xl * scale, best_gain)
    return best, best_centre


def _codes(x: Tensor, scale: Tensor, n_steps: float) -> Tensor:
    """0 … n_steps: x over scale, to the nearest."""
    inverse = torch.where(scale > 0, 1.0 / torch.where(scale > 0, scale, 1.0), 0.0)
    return (x * inverse).add_(0.5).clamp_(0, n_steps).floor_()


def _half(x: Tensor) -> Tensor:
    return x.clamp(-_F16_MAX, _F16_MAX).half()


def _byte(x: Tensor, up: int) -> Tensor:
    """A shared scale of at least 0 as it is stored: without the lowest seven bits of an f16, to which `up` is
    added before."""
    bits = _half(x).view(torch.int16).int() + up
    return (bits >> 7).clamp(max=_BYTE_MAX).bitwise_left_shift(7).to(torch.int16).view(torch.float16).float()


def _rounded(x: Tensor, down: bool) -> Tensor:
    """To f16, all one way."""
    nearest = _half(x)
    beyond = nearest > x if down else nearest < x
    return torch.where(beyond, _neighbour(nearest, -1 if down else 1), nearest).float()


def _neighbour(x: Tensor, step: int) -> Tensor:
    """The next f16 above (1) or below (-1): one away in the order of sign and magnitude, where 0 is -0."""
    bits = x.view(torch.int16).int()
    order = torch.where(bits < 0, -(bits & 0x7FFF), bits) + step
    return torch.where(order < 0, -order | 0x8000, order).to(torch.int16).view(torch.float16)
