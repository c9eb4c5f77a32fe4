// JSON schemas as grammars, by llama.cpp's converter.
#pragma once

#include <string>
#include <string_view>

namespace lkv {

// GBNF whose rule `root` is the JSON texts that fit the schema. Errors: Error `[json_schema] …` for what is no JSON, no schema,
// or says what a grammar cannot.
std::string json_schema_to_grammar(std::string_view schema);

// The text of an exception in one line: without the listing of a template's source, at most 300 bytes.
std::string reason(const std::exception& error);

}  // namespace lkv
