"""Palu (arXiv 2407.21118), figure 5: Llama-2-7B on an RTX 4090, half of the cache, against eager attention.

Its timings keep a quarter of K's dimensions and three quarters of V's, in groups of four heads. Without RoPE
nothing is rebuilt: here K is rotated by an orthogonal matrix after RoPE, whose attention takes the same work.
"""

from papers.case import Cache, Claim, Paper

ROPE, NO_ROPE = "rebuild:128:4/latent:384:4", "rotated:128:4/latent:384:4"
LENGTH = 65536
PAPER = Paper(
    "palu",
    "7b",
    (
        Claim("RoPE, half", "attention", Cache(ROPE), LENGTH, "1.89 x"),
        Claim("RoPE, half, V in 4 bits", "attention", Cache(ROPE, "f16", "q4"), LENGTH, "2.91 x"),
        Claim("no RoPE, half", "attention", Cache(NO_ROPE), LENGTH, "2.20 x"),
        Claim("no RoPE, half, 4 bits", "attention", Cache(NO_ROPE, "q4", "q4"), LENGTH, "6.17 x"),
        Claim("RoPE, half", "step", Cache(ROPE), LENGTH, "1.71 x"),
        Claim("RoPE, half, V in 4 bits", "step", Cache(ROPE, "f16", "q4"), LENGTH, "2.59 x"),
        Claim("no RoPE, half", "step", Cache(NO_ROPE), LENGTH, "2.05 x"),
        Claim("no RoPE, half, 4 bits", "step", Cache(NO_ROPE, "q4", "q4"), LENGTH, "5.53 x"),
    ),
)
