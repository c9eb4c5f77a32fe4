"""Llama's block with a norm on every query and key head, and something of its own beside it."""
