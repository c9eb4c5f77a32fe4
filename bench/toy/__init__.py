"""Parts of hybrid_toy.py: what the toy reads, and its forward pass in few kernels."""
