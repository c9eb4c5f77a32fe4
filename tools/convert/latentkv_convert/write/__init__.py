"""How a plan becomes a file: tensors of every cache path, what is fused into them, weight types, the GGUF."""
