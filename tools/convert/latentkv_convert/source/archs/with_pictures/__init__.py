"""Architectures whose checkpoints see pictures, as most of them are published: their text part."""
