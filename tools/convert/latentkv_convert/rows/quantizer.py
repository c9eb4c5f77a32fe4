"""The cache's row formats in torch, to measure what a plan costs
(native/src/cache/formats/{affine,fit,normal}.h)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .sizes import has_row_scale

# Optimal step of a uniform quantizer with 2^b levels for a Gaussian of standard deviation 1 (Max 1960).
GAUSSIAN_STEP = {1: 1.5958, 2: 0.9957, 3: 0.5860, 4: 0.3352, 5: 0.1881, 6: 0.1041, 8: 0.0308}
MAX_FITTED_BITS = 4
_N_REFINE = 3
SPANNED = 6  # bits from which a scale shared by a row's segments spans their values; below, it is fitted
FITTED_FROM = 3  # bits of the channels that it is fitted to
_N_SCALES = 2
_F16_MAX = 65504.0


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


def stored_rows(x: Tensor, segments: Sequence[tuple[int, str]]) -> Tensor:
    """What a cache returns for whole rows x [n, channels] f32 of segments: (channels, format)."""
    if has_row_scale(fmt for _, fmt in segments):
        return _scaled_rows(x, segments)
    pieces = x.split([width for width, _ in segments], dim=-1)
    return torch.cat([stored(each, fmt) for each, (_, fmt) in zip(pieces, segments, strict=True)], -1)


def _scaled_rows(x: Tensor, segments: Sequence[tuple[int, str]]) -> Tensor:
    """Rows whose segments in n8 … n1 or none share two f16 scales, one from SPANNED bits on and one below."""
    pieces = x.split([width for width, _ in segments], dim=-1)
    parts = [(piece, fmt) for piece, (_, fmt) in zip(pieces, segments, strict=True)]
    fine = [each for each in parts if is_spanned(each[1])]
    coarse = [each for each in parts if not is_spanned(each[1]) and each[1] != "none"]
    scales = spanning(fine) if fine else None, least_squares(coarse) if coarse else None
    held = []
    for part, fmt in parts:
        scale = scales[_bits(fmt) < SPANNED]
        held.append(
            torch.zeros_like(part) if fmt == "none" or scale is None else levels(part, scale, fmt) * scale
        )
    return torch.cat(held, -1)


def spanning(parts: Sequence[tuple[Tensor, str]]) -> Tensor:
    """[..., 1] the smallest f16 at which no value is beyond the outermost level: among eight bits a clipped
    value costs more than all others (SmolLM2-135M at 28 % of f16: 0.0007 nats, not 0.0003)."""
    most = torch.cat([part.abs() / outermost(fmt) for part, fmt in parts], -1)
    return _rounded(most.amax(-1, keepdim=True), down=False)


def least_squares(parts: Sequence[tuple[Tensor, str]]) -> Tensor:
    """[..., 1] f16 of least squared error in the channels with FITTED_FROM bits or more, if there are any. It
    starts as the root mean square, and twice follows from the nearest levels.

    One bit would pull it away from what four need (SmolLM2-135M at 14 % of f16: a fifth more weighted error).
    """
    fitted = [each for each in parts if _bits(each[1]) >= FITTED_FROM] or parts
    values = torch.cat([part for part, _ in fitted], -1)
    scale = values.square().mean(-1, keepdim=True).sqrt()
    for _ in range(_N_SCALES):
        nearest = torch.cat([levels(part, scale, fmt) for part, fmt in fitted], -1)
        xl, ll = (values * nearest).sum(-1, keepdim=True), nearest.square().sum(-1, keepdim=True)
        scale = torch.where((xl > 0) & (ll > 0), xl / torch.where(ll > 0, ll, 1.0), scale)
    return _half(scale).float()


def levels(x: Tensor, scale: Tensor, fmt: str) -> Tensor:
    """The levels nearest to x / scale in n8 … n1: evenly apart, for a normal distribution of standard
    deviation 1."""
    step, most = GAUSSIAN_STEP[_bits(fmt)], float(2 ** _bits(fmt) - 1)
    return _codes(x + outermost(fmt) * scale, step * scale, most).sub_(most / 2).mul_(step)


def is_spanned(fmt: str) -> bool:
    """Whether the scale that these segments share spans their values."""
    return _bits(fmt) >= SPANNED


def outermost(fmt: str) -> float:
    """Level of n8 … n1."""
    return GAUSSIAN_STEP[_bits(fmt)] * (2 ** _bits(fmt) - 1) / 2


def _bits(fmt: str) -> int:
    """The bits of n8 … n1, or 0."""
    return 0 if fmt == "none" else int(fmt[1:])


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
