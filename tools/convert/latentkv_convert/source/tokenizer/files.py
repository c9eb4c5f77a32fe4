"""What a checkpoint says about its tokenizer, read once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...errors import ConvertError
from ..checkpoint import read_json
from .proto import SentencePieceModel

# libllama's token types
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


class TokenizerFiles:
    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        self.directory = directory
        self.config = config

    def _optional(self, name: str) -> dict[str, Any]:
        path = self.directory / name
        loaded = read_json(path) if path.is_file() else {}
        if not isinstance(loaded, dict):
            raise ConvertError(name, "a JSON object", type(loaded).__name__)
        return loaded

    @cached_property
    def json(self) -> dict[str, Any]:
        """tokenizer.json, or {}."""
        return self._optional("tokenizer.json")

    @cached_property
    def settings(self) -> dict[str, Any]:
        """tokenizer_config.json, or {}."""
        return self._optional("tokenizer_config.json")

    @cached_property
    def generation(self) -> dict[str, Any]:
        return self._optional("generation_config.json")

    @property
    def model(self) -> dict[str, Any]:
        model: dict[str, Any] = self.json.get("model") or {}
        return model

    @cached_property
    def sentencepiece(self) -> SentencePieceModel | None:
        path = self.directory / "tokenizer.model"
        return SentencePieceModel.parse(path.read_bytes()) if path.is_file() else None

    @cached_property
    def added(self) -> dict[int, tuple[str, bool]]:
        """Added tokens: id -> (text, special)."""
        found: dict[int, tuple[str, bool]] = {}
        for text, token in self._optional("added_tokens.json").items():
            found[int(token)] = (text, False)
        for token, entry in (self.settings.get("added_tokens_decoder") or {}).items():
            found[int(token)] = (entry["content"], bool(entry.get("special")))
        for entry in self.json.get("added_tokens") or []:
            found[int(entry["id"])] = (entry["content"], bool(entry.get("special")))
        kept = self.config.get("output_vocab_size")  # others are tokens of pictures and sounds
        return found if kept is None else {token: each for token, each in found.items() if token < kept}


@dataclass
class Vocabulary:
    """Tokens, types and, by family, merges or scores, of every id below n_vocab."""

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float] | None = None
    merges: list[str] | None = None
    flags: dict[str, Any] | None = None

    @classmethod
    def empty(cls, model: str, pre: str, n_vocab: int) -> Vocabulary:
        return cls(model, pre, [f"[PAD{i}]" for i in range(n_vocab)], [UNUSED] * n_vocab)

    def put(self, token: int, text: str, kind: int, score: float = 0.0) -> None:
        if not 0 <= token < len(self.tokens):
            raise ConvertError(
                "tokenizer", f"token ids below vocab_size {len(self.tokens)}", f"{token} ({text!r})"
            )
        self.tokens[token], self.types[token] = text, kind
        if self.scores is not None:
            self.scores[token] = score

    def put_added(self, added: dict[int, tuple[str, bool]], score: float = 0.0) -> None:
        """Special tokens become CONTROL, other added ones USER_DEFINED (matched in text before the merges
        run)."""
        for token, (text, is_special) in added.items():
            if (
                self.scores is not None
                and 0 <= token < len(self.types)
                and self.types[token] in (UNKNOWN, BYTE)
            ):
                continue  # SentencePiece's own <unk> and bytes keep their types
            self.put(token, text, CONTROL if is_special else USER_DEFINED, score)

    def keys(self) -> dict[str, Any]:
        result: dict[str, Any] = {
            "tokenizer.ggml.model": self.model,
            "tokenizer.ggml.pre": self.pre,
            "tokenizer.ggml.tokens": self.tokens,
            "tokenizer.ggml.token_type": self.types,
        }
        if self.scores is not None:
            result["tokenizer.ggml.scores"] = self.scores
        if self.merges:
            result["tokenizer.ggml.merges"] = self.merges
        return result | (self.flags or {})
