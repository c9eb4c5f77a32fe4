"""Many requests over one cache: each has a sequence of it, and all are decoded together."""
