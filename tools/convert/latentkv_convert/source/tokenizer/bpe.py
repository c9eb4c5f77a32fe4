"""Byte-level BPE: tokens, merges, and the name libllama gives to the tokenizer's split rules."""

from __future__ import annotations

from typing import Any

from ...errors import ConvertError, warn
from . import pre as pre_tokenizer
from .files import NORMAL, TokenizerFiles, Vocabulary


def read(files: TokenizerFiles, n_vocab: int, pre: str | None) -> Vocabulary:
    """Vocabulary of a tokenizer.json whose model is BPE without byte fallback."""
    model = files.model
    for option in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            raise ConvertError("tokenizer.json", f"a byte-level BPE without {option}", repr(model[option]))
    name = pre or _mended(files, pre_tokenizer.identify(files.json))
    vocabulary = Vocabulary.empty("gpt2", name, n_vocab)
    for text, token in model["vocab"].items():
        vocabulary.put(int(token), text, NORMAL)
    vocabulary.put_added(files.added)
    vocabulary.merges = [_merge(pair) for pair in model["merges"]]
    if not vocabulary.merges:
        raise ConvertError("tokenizer.json", "a BPE with a merge or more, as every reader does", "none")
    return vocabulary


def _mended(files: TokenizerFiles, name: str) -> str:
    """Mistral's checkpoints of 2025 were published with Llama 3's split rules, which are not the model's
    (transformers: fix_mistral_regex)."""
    is_mistral = files.config.get("model_type") in ("mistral", "mistral3", "ministral3")
    is_new = any(text == "[INST]" for text, _ in files.added.values())
    if name not in ("llama-bpe", "dbrx") or not is_mistral or not is_new:
        return name
    warn(
        "tokenizer.json", "Mistral's split rules", f"those of {name}", "tekken is written; --pre overrides it"
    )
    return "tekken"


def _merge(pair: Any) -> str:
    """ "left right"; a space inside a part would be read as the separator, so it is written as its byte
    symbol Ġ."""
    if isinstance(pair, str):
        return pair
    left, right = (part.replace(" ", "\u0120") for part in pair)
    return f"{left} {right}"
