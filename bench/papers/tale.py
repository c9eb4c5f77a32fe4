"""TALE, figure 2: a head of Llama-2-7B, against a low-rank cache that is rebuilt (Palu's) and full rows.

K stays whole, V is a latent of which old tokens keep a part; nothing is rebuilt while decoding.
"""

from papers.case import Cache, Claim, Paper

PAPER = Paper(
    "tale",
    "7b",
    (Claim("K whole, half of V", "attention", Cache("full/latent:256:4"), 65536, "2 x of what rebuilds"),),
)
