"""Eigen Attention (arXiv 2408.05646), table 5: a layer of OPT-66B after a prompt of 2048 tokens, 2 A100s.

60 % of the dimensions of each head are kept. OPT has no RoPE: K's latent is read as it is, which a rotation
after RoPE does too.
"""

from papers.case import Cache, Claim, Paper

KEPT = Cache("rotated:80/latent:80")
PAPER = Paper(
    "eigen",
    "66b",
    (
        Claim("60 % kept", "attention", KEPT, 2048, "-60 %"),
        Claim("60 % kept", "attention", KEPT, 16384, "not said"),
    ),
    n_layer=4,
)
