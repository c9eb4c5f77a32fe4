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


def literal(field: str, value: Any, enums: dict[str, list[str]]) -> str:
    if isinstance(value, float):
        return f"{value!r}F"
    if isinstance(value, (bool, int)):
        return json.dumps(value)
    if value not in enums[field]:
        raise SystemExit(f"[schema] expected {field} among {enums[field]}; got {value!r}")
    return f"{type_name(field)}::{value}"


def block_struct(words: dict[str, Any], options: dict[str, Any], enums: dict[str, list[str]]) -> list[str]:
    """The struct of what is said once for all layers, and functions that visit its fields."""
    about = {name: option["about"] for name, option in options.items()}
    defaults = words | {name: option["default"] for name, option in options.items()}
    out = ["// latentkv.block.*, what is said once for all layers.", "struct Block {"]
    for name, value in defaults.items():
        comment = f"  // {about[name]}" if name in about else ""
        out.append(f"    {type_of(name, value)} {identifier(name)} = {literal(name, value, enums)};{comment}")
    out += ["};", ""]
    for function, names in (("each_word", words), ("each_option", options)):
        out += ["// visit(key, field), and for an enumeration visit(key, field, words)."]
        out += ["template <typename Visit>", f"void {function}(Block & block, Visit && visit) {{"]
        for name in names:
            allowed = f", {name}_words" if name in enums else ""
            out.append(f"    visit(key::block_{name}, block.{name}{allowed});")
        out += ["}", ""]
    return out


def stock_struct(schema: dict[str, Any], block: list[str]) -> list[str]:
    """The table of stock architectures. block: names of the struct's fields."""
    enums, options, stock = schema["enums"], schema["stock_options"], schema["stock_blocks"]
    defaults = schema["block_words"] | {name: o["default"] for name, o in schema["block_options"].items()}
    out = ["struct StockBlock {", "    std::string_view architecture;", "    Block block;"]
    out += [f"    {type_of(name, value)} {identifier(name)};" for name, value in options.items()]
    out += ["};", "", f"inline constexpr std::array<StockBlock, {len(stock)}> stock_blocks = {{{{"]
    for architecture, given in stock.items():
        values = defaults | options | given
        types = {name: type_of(name, value) for name, value in values.items()}
        if types != {name: type_of(name, value) for name, value in (defaults | options).items()}:
            known = ", ".join(defaults | options)
            raise SystemExit(f"[schema] expected stock_blocks.{architecture} of {known}; got {given}")
        own, others = ([literal(name, values[name], enums) for name in names] for names in (block, options))
        out.append(f"    {{{json.dumps(architecture)}, {{{', '.join(own)}}}, {', '.join(others)}}},")
    return [*out, "}};", ""]


def all_keys(schema: dict[str, Any]) -> dict[str, str]:
    block = [*schema["block_words"], *schema["block_options"], *schema["block_layers"]]
    return schema["keys"] | {f"block_{name}": f"latentkv.block.{name}" for name in block}


def generate(schema: dict[str, Any]) -> str:
    keys, enums = all_keys(schema), schema["enums"]
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

    out += block_struct(schema["block_words"], schema["block_options"], enums)
    out += stock_struct(schema, [*schema["block_words"], *schema["block_options"]])
    return "\n".join([*out, "}  // namespace lkv::schema", ""])


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
