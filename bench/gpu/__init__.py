"""Whole models and caches on GPUs: speed, memory, logits, crashes."""
