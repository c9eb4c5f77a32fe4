"""Which of libllama's pre-tokenizers splits text as a tokenizer.json does.

Decided by the rules themselves (the list of splits and `ignore_merges`), never by a model's name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...errors import ConvertError

_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+@|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*@|"
)
_LLAMA3 = rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_QWEN2 = rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_SEED = rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_TAIL}"
_LINES = r"[^\n]+|[\n]+"
_QWEN35 = (
    rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_TAIL}"
)
_GPT4O = _CASED.replace("@", _ENGLISH + "?") + rf"\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
_TEKKEN = _CASED.replace("@", "") + rf"\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}"
)
BYTES = "byte-level"  # ByteLevel with its own (GPT-2) regular expression
DIGITS = "digits, one by one"
DIGIT_RUNS = "digits, runs"
PUNCTUATION = "punctuation, runs"

# (splits in order, ignore_merges) -> tokenizer.ggml.pre. Two names may share the splits and differ in
# ignore_merges: libllama's llama-bpe looks a whole word up before merging, dbrx never does.
_NAMES: dict[tuple[tuple[str, ...], bool], str] = {
    ((_LLAMA3,), True): "llama-bpe",
    ((_LLAMA3,), False): "dbrx",
    ((_QWEN2,), False): "qwen2",
    ((_QWEN35,), False): "qwen35",
    ((_LINES, _QWEN2), False): "laguna",
    ((_SEED,), False): "seed-coder",
    ((_GPT4O,), False): "gpt-4o",
    ((_TEKKEN,), True): "tekken",
    ((BYTES,), False): "gpt-2",
    ((DIGITS, BYTES), False): "smollm",
    ((PUNCTUATION, BYTES, DIGIT_RUNS, "[0-9][0-9][0-9]"), False): "falcon",
    ((PUNCTUATION, BYTES, "[0-9][0-9][0-9]"), False): "falcon",
    ((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", DIGITS), False): "deepseek-coder",
    ((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3), False): "deepseek-v3",
}


def identify(tokenizer: dict[str, Any]) -> str:
    """`tokenizer.ggml.pre` of a byte-level BPE tokenizer.json.

    Raises:
        ConvertError: libllama has no pre-tokenizer with these splits.
    """
    splits = tuple(_splits(tokenizer.get("pre_tokenizer")))
    ignore_merges = bool(tokenizer["model"].get("ignore_merges"))
    normalizer = (tokenizer.get("normalizer") or {}).get("type")
    name = _NAMES.get((splits, ignore_merges))
    if name is None or normalizer not in (None, "NFC", "Sequence"):
        got = " then ".join(splits) or "none"
        raise ConvertError(
            "tokenizer",
            "split rules that libllama knows",
            f"{got[:200]} (ignore_merges {str(ignore_merges).lower()}, normalizer {normalizer})",
            f"pass --pre NAME with one of its names, such as {', '.join(sorted(set(_NAMES.values())))}",
        )
    return name


def _splits(node: Any) -> Iterator[str]:
    """Flattens a pre_tokenizer into its splitting rules; a rule this module has no word for keeps its own
    spelling."""
    if not node:
        return
    kind = node.get("type")
    if kind == "Sequence":
        for child in node.get("pretokenizers", []):
            yield from _splits(child)
    elif kind == "ByteLevel":
        if node.get("add_prefix_space"):
            yield "ByteLevel with add_prefix_space"
        elif node.get("use_regex", True):
            yield BYTES
    elif kind == "Digits":
        yield DIGITS if node.get("individual_digits") else DIGIT_RUNS
    elif kind == "Punctuation" and node.get("behavior") == "Contiguous":
        yield PUNCTUATION
    elif kind == "Split" and not node.get("invert") and node.get("behavior") == "Isolated":
        pattern = node.get("pattern", {})
        split: str = pattern.get("Regex") or pattern.get("String", "")
        yield split.replace("\r", r"\r").replace("\n", r"\n")
    else:
        yield f"{kind} { ({k: v for k, v in node.items() if k != 'type'}) }"
