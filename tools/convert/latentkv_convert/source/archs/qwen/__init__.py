"""Qwen 1.5 to 3 with and without experts, and those that also see pictures."""
