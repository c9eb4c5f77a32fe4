"""Where a model comes from: a checkpoint directory, its architecture, its RoPE scaling and its vocabulary."""
