"""LoRC (arXiv 2410.03111): 55 to 60 % of the cache's memory is kept, one latent for all heads of a layer.

Its throughput (table 5: up to 1.3 x) comes from batches that then fit; here it is time between tokens.
"""

from papers.case import Cache, Claim, Paper

KEPT = Cache("rebuild:608:8/latent:608:8")
PAPER = Paper(
    "lorc",
    "8b",
    (
        Claim("60 % kept", "bytes", KEPT, 8192, "-40 to -45 %"),
        Claim("60 % kept, 8 sequences", "step", KEPT, 8192, "none for one batch", batch=8),
    ),
)
