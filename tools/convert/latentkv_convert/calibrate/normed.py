"""Projections whose output is normed before heads are made of it."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class NormedLinear(nn.Linear):
    """A projection whose output is normed, over all heads together or each by itself without weights: what is
    cached is linear in that."""

    def __init__(self, linear: nn.Linear, norm: nn.Module) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        self.norm = norm
        self.after: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.after(self.norm(super().forward(x)))
        return y


class HeadNorm(nn.Module):
    """Divides the numbers of every head by their root mean square."""

    def __init__(self, head_dim: int, eps: float) -> None:
        super().__init__()
        self.head_dim, self.eps = head_dim, eps

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (-1, self.head_dim))
        return functional.rms_norm(heads, (self.head_dim,), None, self.eps).flatten(-2)
