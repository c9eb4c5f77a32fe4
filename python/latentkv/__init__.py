"""latentkv: run GGUF models whose KV cache is a quantized low-rank latent.

>>> from latentkv import Llama
>>> llm = Llama("model.gguf", n_ctx=4096, kv="q4")
>>> llm("The cache holds", max_tokens=16)["choices"][0]["text"]
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from latentkv.errors import LatentKVError

if TYPE_CHECKING:
    from latentkv.generate.processors import (
        LogitsProcessor,
        LogitsProcessorList,
        MinTokensLogitsProcessor,
        StoppingCriteria,
        StoppingCriteriaList,
    )
    from latentkv.llama import Llama
    from latentkv.measure.perplexity import perplexity
    from latentkv.sampling.grammar import LlamaGrammar
    from latentkv.sampling.speculative import LlamaDraftModel, LlamaPromptLookupDecoding
    from latentkv.session.prompt_cache import BaseLlamaCache, LlamaDiskCache, LlamaRAMCache
    from latentkv.session.prompt_cache import LlamaRAMCache as LlamaCache
    from latentkv.session.state import LlamaState

    __version__: str

__all__ = [
    "BaseLlamaCache",
    "LatentKVError",
    "Llama",
    "LlamaCache",
    "LlamaDiskCache",
    "LlamaDraftModel",
    "LlamaGrammar",
    "LlamaPromptLookupDecoding",
    "LlamaRAMCache",
    "LlamaState",
    "LogitsProcessor",
    "LogitsProcessorList",
    "MinTokensLogitsProcessor",
    "StoppingCriteria",
    "StoppingCriteriaList",
    "__version__",
    "perplexity",
]

# Loaded on first use: `latentkv --help` and `latentkv convert` start without the native module.
_HOME = {
    "BaseLlamaCache": "latentkv.session.prompt_cache",
    "Llama": "latentkv.llama",
    "LlamaCache": "latentkv.session.prompt_cache",
    "LlamaDiskCache": "latentkv.session.prompt_cache",
    "LlamaDraftModel": "latentkv.sampling.speculative",
    "LlamaGrammar": "latentkv.sampling.grammar",
    "LlamaPromptLookupDecoding": "latentkv.sampling.speculative",
    "LlamaRAMCache": "latentkv.session.prompt_cache",
    "LlamaState": "latentkv.session.state",
    "LogitsProcessor": "latentkv.generate.processors",
    "LogitsProcessorList": "latentkv.generate.processors",
    "MinTokensLogitsProcessor": "latentkv.generate.processors",
    "StoppingCriteria": "latentkv.generate.processors",
    "StoppingCriteriaList": "latentkv.generate.processors",
    "perplexity": "latentkv.measure.perplexity",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from latentkv.version import version

        return version()
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name.isupper() and name in (numbers := _constants()):
        return numbers[name]
    raise AttributeError(f"module 'latentkv' has no attribute {name!r}")


def _constants() -> dict[str, int]:
    """Numbers for type_k, pooling_type and split_mode, by llama.cpp's names: `latentkv.GGML_TYPE_Q8_0`."""
    from latentkv.plan.formats import GGML_TYPES
    from latentkv.session.pooling import POOLINGS

    return {
        **{f"GGML_TYPE_{name.upper()}": number for number, name in GGML_TYPES.items()},
        **{f"LLAMA_POOLING_TYPE_{name.upper()}": number for number, name in enumerate(POOLINGS)},
        "LLAMA_SPLIT_MODE_NONE": 0,
        "LLAMA_SPLIT_MODE_LAYER": 1,
    }
