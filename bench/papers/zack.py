"""ZACK, figures 13 and 14: requests in batches on A100s against vLLM; prompts of some 6000 tokens (arXiv).

Half of the dimensions of every head go, of K after RoPE and of V. Its figures are ranges over models.
"""

from papers.case import Cache, Claim, Paper

HALF = Cache("rotated:64/latent:64")
PAPER = Paper(
    "zack",
    "7b",
    (
        Claim("8 sequences, half", "step", HALF, 6144, "-25 to -54 %", batch=8),
        Claim("a prompt, half", "first", HALF, 6144, "-34 to -42 %"),
        Claim("a long prompt, half", "first", HALF, 16384, "-37 to -48 %"),
    ),
)
