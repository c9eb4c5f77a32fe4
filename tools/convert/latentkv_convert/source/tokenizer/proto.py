"""Reads the few fields of a SentencePiece model that a GGUF needs, straight from its protocol buffer."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ...errors import ConvertError

UNIGRAM = 1  # TrainerSpec.model_type


@dataclass
class SentencePieceModel:
    pieces: list[tuple[str, float, int]] = field(
        default_factory=list
    )  # text, score, type (as libllama numbers them)
    model_type: int = UNIGRAM
    charsmap: bytes = b""  # the compiled normalisation rules
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True

    @property
    def is_unigram(self) -> bool:
        return self.model_type == UNIGRAM

    @classmethod
    def parse(cls, data: bytes) -> SentencePieceModel:
        """ModelProto: 1 pieces {1 text, 2 score, 3 type}, 2 trainer {3 model type}, 3 normalizer {2 charsmap,
        3 dummy prefix, 4 remove extra whitespaces}.

        Raises:
            ConvertError: not a SentencePiece model.
        """
        model = cls()
        try:
            for number, value in _fields(data):
                if number == 1:
                    piece = dict(_fields(value))
                    model.pieces.append((piece[1].decode("utf-8"), piece.get(2, 0.0), piece.get(3, 1)))
                elif number == 2:
                    model.model_type = dict(_fields(value)).get(3, UNIGRAM)
                elif number == 3:
                    rules = dict(_fields(value))
                    model.charsmap = rules.get(2, b"")
                    model.add_dummy_prefix = bool(rules.get(3, 1))
                    model.remove_extra_whitespaces = bool(rules.get(4, 1))
        except (IndexError, KeyError, TypeError, struct.error, UnicodeDecodeError, AttributeError):
            model.pieces.clear()
        if not model.pieces:
            raise ConvertError(
                "tokenizer.model", "a SentencePiece model", f"{len(data)} bytes that are not one"
            )
        return model


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value) pairs of one message: int for varints, float for 32-bit, bytes for the rest."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
        elif wire == 5:
            yield tag >> 3, struct.unpack_from("<f", data, at)[0]
            at += 4
        elif wire == 1:
            yield tag >> 3, data[at : at + 8]
            at += 8
        elif wire == 2:
            length, at = _varint(data, at)
            if at + length > len(data):
                raise IndexError("field past the end")
            yield tag >> 3, data[at : at + length]
            at += length
        else:
            raise TypeError(f"wire type {wire}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
