"""Turns messages into a prompt: templates, tools, and built-in formats."""
