"""Names of llama-cpp-python's module."""

from latentkv.sampling.speculative import LlamaDraftModel, LlamaPromptLookupDecoding

__all__ = ["LlamaDraftModel", "LlamaPromptLookupDecoding"]
