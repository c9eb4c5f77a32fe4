"""What llama-cpp-python's classes have, and which of it is missing here."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

import latentkv
from latentkv import compat

NAMES = json.loads((Path(__file__).parent / "llama_cpp_names.json").read_text(encoding="utf-8"))

# Class.name, or Class.name.argument: why it is not here. Arguments that are accepted at their neutral value
# alone are in compat.py, with what to do instead.
MISSING = {
    "Llama.ctx": "a pointer for llama.cpp's C functions; there is no llama_context here",
    "Llama.from_pretrained.additional_files": "the parts of a model are found by the name of one",
    "Llama.from_pretrained.local_dir_use_symlinks": "huggingface_hub has no such option any more",
    "LlamaState.__init__.scores": "only the last row of logits is kept: `logits`",
    "LlamaState.__init__.n_tokens": "a property: the length of input_ids",
    "LlamaState.__init__.llama_state": "named `cache`",
    "LlamaState.__init__.llama_state_size": "a property",
    "LlamaGrammar.__init__._grammar": "the text is the first argument",
    "LlamaPromptLookupDecoding.find_candidate_pred_tokens": "how it works inside; call the object",
}

MEMBERS = [(kind, name) for kind, found in NAMES["classes"].items() for name in found]


def accepts(function: Any, argument: str) -> bool:
    """Whether a call may name the argument."""
    parameters = inspect.signature(function).parameters
    return argument in parameters or any(p.kind is p.VAR_POSITIONAL for p in parameters.values())


@pytest.mark.parametrize(("kind", "name"), MEMBERS)
def test_every_name_is_here_or_has_a_reason(kind: str, name: str) -> None:
    missing = {key: why for key, why in MISSING.items() if key.startswith(f"{kind}.{name}")}
    ours = getattr(getattr(latentkv, kind), name, None)
    if f"{kind}.{name}" in missing:
        assert ours is None, "it is here: take it off the list"
        return
    assert ours is not None
    if not callable(ours) or isinstance(ours, property):
        return
    for argument in NAMES["classes"][kind][name]:
        here = accepts(ours, argument) or (
            f"{kind}.{name}" == "Llama.__init__" and argument in compat._NEUTRAL
        )
        assert here != (f"{kind}.{name}.{argument}" in missing), argument


def test_the_list_of_what_is_missing_names_what_exists() -> None:
    for key in MISSING:
        kind, name, *argument = key.split(".")
        assert name in NAMES["classes"][kind]
        assert set(argument) <= set(NAMES["classes"][kind][name])


def test_neutral_values_are_for_arguments_that_exist() -> None:
    known = {*NAMES["classes"]["Llama"]["__init__"], "chat_handler", "lora_base"}
    assert set(compat._NEUTRAL) <= known


def test_constants_keep_their_names_and_numbers() -> None:
    """`import latentkv as llama_cpp`, then Llama(…, type_k=llama_cpp.GGML_TYPE_Q8_0)."""
    names = ("GGML_TYPE_F16", "GGML_TYPE_Q8_0", "GGML_TYPE_BF16", "LLAMA_POOLING_TYPE_LAST")
    assert [getattr(latentkv, name) for name in names] == [1, 8, 30, 3]
    assert (latentkv.LLAMA_SPLIT_MODE_NONE, latentkv.LLAMA_SPLIT_MODE_LAYER) == (0, 1)
    assert not hasattr(latentkv, "GGML_TYPE_Q9_0")
