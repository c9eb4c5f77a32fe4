"""Anthropic's Messages interface."""
