"""How some checkpoints store weights: in FP8 beside scales, and in files of PyTorch."""
