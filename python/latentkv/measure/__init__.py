"""Speed, perplexity, and the divergence from another cache."""
