"""Special token ids, whether BOS and EOS are added to a prompt, and the chat template."""

from __future__ import annotations

import re
from typing import Any

from latentkv.console.reading import read_text

from ...errors import ConvertError
from ..checkpoint import read_json
from .files import TokenizerFiles

# our name in the config -> libllama's key
_KINDS = {
    "bos": "bos",
    "eos": "eos",
    "unk": "unknown",
    "sep": "seperator",  # spelled so in the file format
    "pad": "padding",
    "mask": "mask",
}


def keys(files: TokenizerFiles, family: str, n_vocab: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for kind, name in _KINDS.items():
        token = token_id(files, kind)
        if token is not None and 0 <= token < n_vocab:
            result[f"tokenizer.ggml.{name}_token_id"] = token
    result["tokenizer.ggml.add_bos_token"] = adds(files, "bos", family)
    result["tokenizer.ggml.add_eos_token"] = adds(files, "eos", family)
    return result | _chat_templates(files)


def token_id(files: TokenizerFiles, kind: str) -> int | None:
    """The tokenizer's own token first, then config.json, then generation_config.json (first of a list)."""
    text = files.settings.get(f"{kind}_token")
    if isinstance(text, dict):
        text = text.get("content")
    if isinstance(text, str):
        for token, (content, _) in files.added.items():
            if content == text:
                return token
        vocab = files.model.get("vocab")
        if isinstance(vocab, dict) and text in vocab:
            return int(vocab[text])
        if files.sentencepiece:
            for token, (piece, _, _) in enumerate(files.sentencepiece.pieces):
                if piece == text:
                    return token
    for source in (files.config, files.generation):
        value = source.get(f"{kind}_token_id")
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, bool):
            raise ConvertError("tokenizer", f"a number as {kind}_token_id", str(value))
        if isinstance(value, int):
            return value
    return None


def adds(files: TokenizerFiles, kind: str, family: str) -> bool:
    """Whether `encode` adds BOS (or EOS): the explicit setting, else the post-processor's template, else the
    custom of the family for a checkpoint that has only a SentencePiece model (Llama adds BOS, T5 adds
    EOS)."""
    setting = files.settings.get(f"add_{kind}_token")
    if isinstance(setting, bool):
        return setting
    if files.json:
        template = _template(files.json.get("post_processor"))
        edge = (template[:1] if kind == "bos" else template[-1:]) if template else []
        return bool(edge) and "SpecialToken" in edge[0]
    return (family, kind) in (("llama", "bos"), ("t5", "eos"))


def _template(node: Any) -> list[dict[str, Any]]:
    """The `single` template of a TemplateProcessing, alone or inside a Sequence."""
    if not node:
        return []
    if node.get("type") == "TemplateProcessing":
        single: list[dict[str, Any]] = node.get("single") or []
        return single
    for child in node.get("processors", []):
        if found := _template(child):
            return found
    return []


def _chat_templates(files: TokenizerFiles) -> dict[str, Any]:
    """`tokenizer.chat_template` and named variants, from chat_template.jinja, chat_template.json or the
    settings."""
    directory = files.directory
    template: Any = files.settings.get("chat_template")
    if (directory / "chat_template.jinja").is_file():
        template = read_text(directory / "chat_template.jinja")
    elif template is None and (directory / "chat_template.json").is_file():
        template = read_json(directory / "chat_template.json").get("chat_template")
    named: dict[str, str] = {}
    if isinstance(template, str):
        named["default"] = template
    elif isinstance(template, list):
        named.update({entry["name"]: entry["template"] for entry in template})
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        named[path.stem] = read_text(path)
    result: dict[str, Any] = {}
    if "default" in named:
        result["tokenizer.chat_template"] = named.pop("default")
    if named:
        names = {re.sub(r"[^a-z0-9_]", "_", name.lower()): text for name, text in named.items()}
        result["tokenizer.chat_templates"] = list(names)
        result |= {f"tokenizer.chat_template.{name}": text for name, text in names.items()}
    return result
