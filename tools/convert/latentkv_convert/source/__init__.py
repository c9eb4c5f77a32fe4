"""Where a model comes from, a checkpoint directory or a GGUF: architecture, RoPE, tensors and vocabulary."""
