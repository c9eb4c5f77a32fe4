"""Reads the few fields of a SentencePiece model that a GGUF needs, with the library's own protocol buffer."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import ConvertError, need

UNIGRAM = 1  # TrainerSpec.model_type


@dataclass(frozen=True)
class SentencePieceModel:
    pieces: list[tuple[str, float, int]]  # text, score, type (as libllama numbers them)
    model_type: int
    charsmap: bytes  # the compiled normalisation rules
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool

    @property
    def is_unigram(self) -> bool:
        return self.model_type == UNIGRAM

    @classmethod
    def parse(cls, data: bytes) -> SentencePieceModel:
        """
        Raises:
            ConvertError: not a SentencePiece model.
        """
        model = need("sentencepiece.sentencepiece_model_pb2").ModelProto()
        damaged = need("google.protobuf.message").DecodeError
        try:
            model.ParseFromString(data)
            pieces = [(piece.piece, piece.score, piece.type) for piece in model.pieces]
        except (damaged, UnicodeDecodeError):
            pieces = []
        if not pieces:
            raise ConvertError(
                "tokenizer.model", "a SentencePiece model", f"{len(data)} bytes that are not one"
            )
        rules = model.normalizer_spec
        return cls(
            pieces,
            model.trainer_spec.model_type,
            rules.precompiled_charsmap,
            rules.add_dummy_prefix,
            rules.remove_extra_whitespaces,
        )
