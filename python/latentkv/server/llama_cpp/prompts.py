"""Prompts as llama.cpp's server takes them: text, token ids, both mixed, or several of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from latentkv.errors import expected
from latentkv.server.errors import Refused
from latentkv.server.serving import Serving
from latentkv.text import utf8

_SHAPES = "a text, token ids, a list that mixes both, or a list of prompts"


def prompts_of(given: Any, name: str = "prompt") -> list[Any]:
    """Each a text or a list of token ids and texts. A list of texts alone is several prompts, one in which a
    token id stands is one. name: the field's, for errors."""
    if isinstance(given, str | dict):
        return [_one(given, name)]
    if not isinstance(given, list) or not given:
        raise expected(name, _SHAPES, _kind(given))
    if any(_is_token(each) for each in given):
        return [_mixed(given, name)]
    return [_one(each, name) for each in given]


def mixed_tokens(
    serving: Serving, given: str | Sequence[Any], special: bool, start: bool, name: str = "prompt"
) -> list[int]:
    """special: the text of special tokens is read as them. start: a text at the beginning gets what the
    vocabulary puts before one."""
    parts = [given] if isinstance(given, str) else list(given)
    serving.check_length(sum(len(part) for part in parts if isinstance(part, str)))
    tokens: list[int] = []
    for at, part in enumerate(parts):
        if isinstance(part, str):
            tokens += serving.model.tokenize(utf8(part, name), start and at == 0, special)
        elif 0 <= part < serving.model.n_vocab:
            tokens.append(part)
        else:
            raise expected(name, f"token ids below {serving.model.n_vocab}", part)
    return tokens


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _one(given: Any, name: str) -> Any:
    if isinstance(given, dict):
        if given.get("multimodal_data"):
            raise Refused(501, f"[{name}] expected no multimodal_data, as models here read text; got some")
        given = given.get("prompt_string")
    if isinstance(given, str):
        return given
    if isinstance(given, list) and given:
        return _mixed(given, name)
    raise expected(name, _SHAPES, _kind(given))


def _kind(given: Any) -> str:
    if given is None:
        return "nothing"
    return "an empty list" if given == [] else type(given).__name__


def _mixed(given: list[Any], name: str) -> list[Any]:
    wrong = next((each for each in given if not isinstance(each, str) and not _is_token(each)), None)
    if wrong is not None:
        raise expected(name, "token ids and texts in a list", type(wrong).__name__)
    return given
