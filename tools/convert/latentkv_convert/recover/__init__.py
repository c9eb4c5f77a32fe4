"""Training of factors after the plan (`--finetune`)."""
