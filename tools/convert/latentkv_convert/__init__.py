"""Converts a Hugging Face decoder checkpoint to a GGUF whose KV cache is a low-rank latent."""
