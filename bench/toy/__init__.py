"""A toy in Qwen 3.5's layout: its training, what it reads, its forward pass, what its cache loses."""
