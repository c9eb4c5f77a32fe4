"""Turns the format's schema (JSON) into gguf_schema.h: key names, enumerations and their words, stock blocks.

Usage: gen_schema.py SCHEMA.json OUT.h (rewritten only when its text changes, so nothing rebuilds in vain)
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

HEADER = """\
// Generated from schema.json by gen_schema.py; edit the schema. What each key means: docs/gguf.md.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
"""

PARSE = """\
// The position of `word` in an enumeration's words, or nullopt.
template <typename Enum, std::size_t n>
constexpr std::optional<Enum> parse(const std::array<std::string_view, n> & words, std::string_view word) {
    for (std::size_t i = 0; i < n; ++i) {
        if (words[i] == word) {
            return static_cast<Enum>(i);
        }
    }
    return std::nullopt;
}
"""


def type_name(name: str) -> str:
    """k_path -> KPath"""
    return "".join(part.capitalize() for part in name.split("_"))


def identifier(name: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise SystemExit(f"[schema] expected a lower-case identifier; got {name!r}")
    return name


def string_view(name: str, text: str) -> str:
    return f"inline constexpr std::string_view {identifier(name)} = {json.dumps(text)};"


def word_array(name: str, words: list[str]) -> str:
    listed = ", ".join(json.dumps(word) for word in words)
    return f"inline constexpr std::array<std::string_view, {len(words)}> {name} = {{{listed}}};"


def type_of(field: str, value: Any) -> str:
    return {bool: "bool", int: "int", float: "float"}.get(type(value)) or type_name(field)


def stock_block(arch: str, block: dict[str, Any], enums: dict[str, list[str]]) -> str:
    fields = [json.dumps(arch)]
    for field, value in block.items():
        if isinstance(value, (bool, int)):
            fields.append(json.dumps(value))
        elif isinstance(value, float):
            fields.append(f"{value!r}F")
        elif value in enums[field]:
            fields.append(f"{type_name(field)}::{value}")
        else:
            raise SystemExit(
                f"[schema] expected stock_blocks.{arch}.{field} among {enums[field]}; got {value!r}"
            )
    return "    {" + ", ".join(fields) + "},"


def generate(schema: dict[str, Any]) -> str:
    keys, enums, defaults = schema["keys"], schema["enums"], schema["stock_defaults"]
    blocks = {arch: defaults | block for arch, block in schema["stock_blocks"].items()}
    out = [HEADER, "namespace lkv::key {", ""]
    out += [string_view(name, text) for name, text in keys.items()]
    out += ["", word_array("all", list(keys.values())), "", "}  // namespace lkv::key", ""]

    out += ["// Tensor names; {layer} stands for the layer's number.", "namespace lkv::tensor_name {", ""]
    out += [string_view(name, text) for name, text in schema["tensors"].items()]
    out += ["", "}  // namespace lkv::tensor_name", "", "namespace lkv::schema {", ""]

    out += [f"inline constexpr uint32_t version = {schema['version']};"]
    out += [f"inline constexpr uint32_t rank_pad = {schema['rank_pad']};", "", PARSE]
    for name, words in enums.items():
        out += [f"enum class {type_name(name)} {{ {', '.join(map(identifier, words))} }};"]
        out += [word_array(f"{identifier(name)}_words", words), ""]

    first = next(iter(blocks.values()))
    out += ["struct StockBlock {", "    std::string_view architecture;"]
    out += [f"    {type_of(field, value)} {identifier(field)};" for field, value in first.items()]
    out += ["};", "", f"inline constexpr std::array<StockBlock, {len(blocks)}> stock_blocks = {{{{"]
    for arch, block in blocks.items():
        types = {field: type_of(field, value) for field, value in block.items()}
        if types != {field: type_of(field, value) for field, value in first.items()}:
            raise SystemExit(f"[schema] expected stock_blocks.{arch} to have {list(first)}; got {types}")
        out.append(stock_block(arch, block, enums))
    out += ["}};", "", "}  // namespace lkv::schema", ""]
    return "\n".join(out)


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(f"[schema] expected SCHEMA.json OUT.h; got {sys.argv[1:]}")
    text = generate(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    target = Path(sys.argv[2])
    if not target.exists() or target.read_text(encoding="utf-8") != text:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
