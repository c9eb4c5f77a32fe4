"""Names of llama-cpp-python's module."""

from typing import NoReturn

from latentkv.errors import no_name
from latentkv.session.prompt_cache import BaseLlamaCache, LlamaCache, LlamaDiskCache, LlamaRAMCache

__all__ = ["BaseLlamaCache", "LlamaCache", "LlamaDiskCache", "LlamaRAMCache"]

_INSTEAD = {"LlamaTrieCache": "use LlamaRAMCache, whose look-ups are by the longest beginning too"}


def __getattr__(name: str) -> NoReturn:
    raise no_name(__name__, name, _INSTEAD)
